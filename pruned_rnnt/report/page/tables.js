// Tables that sort, filter and turn pages. With page.js, this is one module of the page.
const read = (name) => JSON.parse(document.getElementById(`data-${name}`).textContent);
const element = (name, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
};
const number = new Intl.NumberFormat("en");
const percent = (value) => `${(100 * value).toFixed(2)}%`;

// A text with its errors marked: [reference], or the units of reference and hypothesis, the letters
// of the pairs, and "" if no space stands between units, which zero-width spaces then divide.
const between = "\u200b";
function alignedText(value) {
  const [reference, hypothesis, letters, separator = " "] = value;
  if (letters === undefined) return [reference];
  const split = (text) => (text ? text.split(separator || between) : []);
  const expected = split(reference);
  const found = split(hypothesis);
  const parts = [];
  let e = 0;
  let f = 0;
  for (const letter of letters) {
    if (letter === "=") {
      parts.push(expected[e++] + separator);
      f++;
      continue;
    }
    if (letter !== "i") parts.push(element("del", { textContent: expected[e++] }));
    if (letter === "s") parts.push("\u200a");
    if (letter !== "d") parts.push(element("ins", { textContent: found[f++] }));
    parts.push(separator);
  }
  return parts;
}

const plainText = ([reference, hypothesis = ""]) =>
  [reference, hypothesis].join(" ").replaceAll(between, "");

const numeric = (column) => column.kind !== "text" && column.kind !== "aligned";

// Long names without spaces, such as the speakers of Common Voice, are cut in the middle; the whole
// is a tooltip.
function fillText(cell, value) {
  if (!/^\S{65,}$/.test(value)) return cell.append(value);
  const characters = Array.from(value);
  cell.append(`${characters.slice(0, 14).join("")}\u2026${characters.slice(-6).join("")}`);
  cell.title = value;
}

function fillCell(cell, column, value) {
  // Texts may run from right to left.
  if (!numeric(column)) cell.dir = "auto";
  if (column.kind === "aligned") cell.append(...alignedText(value));
  else if (value === null) cell.append("\u2013");
  else if (column.kind === "text") fillText(cell, value);
  else if (column.kind === "count") cell.append(number.format(value));
  else if (column.kind === "seconds") cell.append(value.toFixed(1));
  else if (column.kind === "share") cell.append(percent(value));
  else if (column.kind === "change") {
    cell.append(value > 0 ? `+${value}` : `\u2212${-value}`);
    cell.classList.add(value > 0 ? "worse" : "better");
  } else {
    cell.append(percent(value));
    cell.classList.add("bar");
    cell.style.setProperty("--share", Math.min(1, value / column.most));
  }
  cell.classList.add(column.kind);
  if (numeric(column)) cell.classList.add("number");
  if (value === 0) cell.classList.add("zero");
}

function buildTable(root) {
  const table = read(root.dataset.table);
  const { columns } = table;
  const rowCount = columns[0].values.length;
  const state = { sort: table.sort, down: true, page: 0, size: 10, query: "" };
  if (!root.classList.contains("compact")) state.size = 25;
  for (const column of columns) {
    if (column.kind !== "rate") continue;
    column.most = Math.min(1, column.values.reduce((most, v) => Math.max(most, v ?? 0), 1e-9));
  }
  let texts = null;
  const textOf = (row) => {
    texts ??= Array.from({ length: rowCount }, (_, each) =>
      columns
        .filter((column) => !numeric(column))
        .map((column) =>
          column.kind === "text" ? column.values[each] : plainText(column.values[each]),
        )
        .join("\n")
        .normalize("NFC")
        .toLowerCase(),
    );
    return texts[row];
  };

  let order = [];
  function arrange() {
    order = Array.from({ length: rowCount }, (_, row) => row);
    const words = state.query.normalize("NFC").toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length) {
      order = order.filter((row) => words.every((word) => textOf(row).includes(word)));
    }
    const { kind, values } = columns[state.sort];
    const sign = state.down ? -1 : 1;
    const compare =
      kind === "text"
        ? (a, b) => (values[a] < values[b] ? -1 : values[a] > values[b] ? 1 : 0)
        : kind === "change"
          ? (a, b) => Math.abs(values[a]) - Math.abs(values[b]) || values[b] - values[a]
          : (a, b) => (values[a] ?? -Infinity) - (values[b] ?? -Infinity) || 0;
    order.sort((a, b) => sign * compare(a, b) || a - b);
  }

  const label = (text, control) => element("label", {}, text, control);
  const filter = element("input", { type: "search", placeholder: "any text" });
  const sizes = element("select");
  for (const size of [10, 25, 100, 500]) {
    sizes.append(element("option", { value: size, textContent: size, selected: size === state.size }));
  }
  const back = element("button", { type: "button", textContent: "Previous" });
  const next = element("button", { type: "button", textContent: "Next" });
  const where = element("span", { className: "where", ariaLive: "polite" });
  const head = element("tr");
  const body = element("tbody");
  const headings = columns.map((column, index) => {
    const heading = element("th", { scope: "col", className: numeric(column) ? "number" : "" });
    if (column.kind === "aligned") heading.append(column.label);
    else {
      const button = element("button", { type: "button", textContent: column.label });
      button.title = column.hint || `Sort by ${column.label}`;
      button.addEventListener("click", () => {
        state.down = state.sort === index ? !state.down : numeric(column);
        state.sort = index;
        state.page = 0;
        arrange();
        show();
      });
      heading.append(button);
    }
    head.append(heading);
    return heading;
  });

  function show() {
    const pages = Math.max(1, Math.ceil(order.length / state.size));
    state.page = Math.min(state.page, pages - 1);
    const first = state.page * state.size;
    const rows = order.slice(first, first + state.size).map((row) => {
      const line = element("tr");
      columns.forEach((column, index) => {
        const cell = index ? element("td") : element("th", { scope: "row" });
        fillCell(cell, column, column.values[row]);
        line.append(cell);
      });
      return line;
    });
    body.replaceChildren(...rows);
    headings.forEach((heading, index) => {
      if (index === state.sort) heading.ariaSort = state.down ? "descending" : "ascending";
      else heading.removeAttribute("aria-sort");
    });
    const last = Math.min(first + state.size, order.length);
    where.textContent = order.length
      ? `${number.format(first + 1)}\u2013${number.format(last)} of ${number.format(order.length)}`
      : "nothing found";
    back.disabled = state.page === 0;
    next.disabled = state.page === pages - 1;
  }

  let waiting = 0;
  filter.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      state.query = filter.value;
      state.page = 0;
      arrange();
      show();
    }, 120);
  });
  sizes.addEventListener("change", () => {
    state.size = Number(sizes.value);
    show();
  });
  for (const [button, step] of [[back, -1], [next, 1]]) {
    button.addEventListener("click", () => {
      state.page += step;
      show();
    });
  }
  const caption = element("caption", { textContent: table.caption });
  const controls = element("div", { className: "controls" }, label("Filter ", filter), label("Rows ", sizes));
  const pager = element("div", { className: "pager" }, back, where, next);
  const whole = element("table", {}, caption, element("thead", {}, head), body);
  arrange();
  show();
  if (rowCount > 10) root.append(controls);
  root.append(element("div", { className: "scroll", tabIndex: 0 }, whole));
  if (rowCount > 10) root.append(pager);
  root.dataset.built = "";
}
