// Builds the tables, and makes tabs, charts and words respond. It comes after tables.js.

// Tables are built when they come near the window.
const roots = document.querySelectorAll(".data-table");
const seen = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      seen.unobserve(entry.target);
      buildTable(entry.target);
    }
  },
  { rootMargin: "600px" },
);
roots.forEach((root) => seen.observe(root));
addEventListener("beforeprint", () => {
  for (const root of roots) {
    if (root.offsetParent === null || "built" in root.dataset) continue;
    seen.unobserve(root);
    buildTable(root);
  }
  document.querySelectorAll("details.picture").forEach((details) => (details.open = true));
  document.querySelectorAll("img").forEach((image) => (image.loading = "eager"));
});

// One decoded set at a time.
const tabs = [...document.querySelectorAll("[role=tab]")];
function choose(chosen) {
  tabs.forEach((tab) => {
    tab.ariaSelected = String(tab === chosen);
    tab.tabIndex = tab === chosen ? 0 : -1;
    document.getElementById(tab.getAttribute("aria-controls")).hidden = tab !== chosen;
  });
}
tabs.forEach((tab, index) => {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const target = tabs[(index + step + tabs.length) % tabs.length];
    choose(target);
    target.focus();
  });
});
if (tabs.length) choose(tabs[0]);
// Links to a part of a set go to that of the set that is shown.
document.querySelectorAll("nav a").forEach((link) => {
  link.addEventListener("click", (event) => {
    const part = document.querySelector(`.set:not([hidden]) .part-${link.hash.slice(1)}`);
    if (!part) return;
    event.preventDefault();
    part.scrollIntoView();
  });
});

// The values of the lines at the step under the pointer.
const hovers = read("hover");
for (const figure of document.querySelectorAll("figure[data-hover]")) {
  const { box, range, percent: isPercent, lines } = hovers[figure.dataset.hover];
  const [left, top, right, bottom] = box;
  const svg = figure.querySelector("svg");
  const keys = figure.querySelectorAll(".key b");
  const at = figure.querySelector(".at");
  const ruler = document.createElementNS("http://www.w3.org/2000/svg", "line");
  ruler.setAttribute("class", "ruler");
  ruler.setAttribute("y1", top);
  ruler.setAttribute("y2", bottom);
  const leave = () => {
    ruler.remove();
    at.textContent = "";
    keys.forEach((key) => (key.textContent = ""));
  };
  svg.addEventListener("pointermove", (event) => {
    const point = new DOMPoint(event.clientX, event.clientY);
    const x = point.matrixTransform(svg.getScreenCTM().inverse()).x;
    if (x < left || x > right) return leave();
    const step = range[0] + ((x - left) / (right - left)) * (range[1] - range[0]);
    let nearest = null;
    lines.forEach(([steps, values], index) => {
      let best = 0;
      steps.forEach((each, place) => {
        if (Math.abs(each - step) < Math.abs(steps[best] - step)) best = place;
      });
      const value = values[best];
      keys[index].textContent = isPercent ? percent(value) : value.toPrecision(4);
      if (nearest === null || Math.abs(steps[best] - step) < Math.abs(nearest - step)) {
        nearest = steps[best];
      }
    });
    at.textContent = `step ${number.format(nearest)}`;
    const place = left + ((nearest - range[0]) / (range[1] - range[0])) * (right - left);
    ruler.setAttribute("x1", place);
    ruler.setAttribute("x2", place);
    svg.append(ruler);
  });
  svg.addEventListener("pointerleave", leave);
}

// A click on a recognised word plays it; playback highlights the current word.
for (const article of document.querySelectorAll(".worst")) {
  const audio = article.querySelector("audio");
  if (!audio) continue;
  const words = [...article.querySelector(".alignment").querySelectorAll("[data-start]")];
  let timer = 0;
  const play = async (word) => {
    clearTimeout(timer);
    await audio.play();
    const begin = Math.max(0, Number(word.dataset.start) - 0.1);
    audio.currentTime = begin;
    timer = setTimeout(() => audio.pause(), 1000 * (Number(word.dataset.end) + 0.1 - begin));
  };
  for (const word of words) {
    word.tabIndex = 0;
    word.setAttribute("role", "button");
    word.title = `Play ${Number(word.dataset.start).toFixed(1)} s`;
    word.addEventListener("click", () => play(word));
    word.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      play(word);
    });
  }
  audio.addEventListener("timeupdate", () => {
    const now = audio.currentTime;
    for (const word of words) {
      const heard = !audio.paused && now >= word.dataset.start && now < word.dataset.end;
      word.classList.toggle("heard", heard);
    }
  });
  audio.addEventListener("pause", () => clearTimeout(timer));
  audio.addEventListener("play", () => {
    document.querySelectorAll("audio").forEach((other) => other !== audio && other.pause());
  });
}
