"""Draws sentences from a small grammar: commands to a house and to a robot."""

from __future__ import annotations

import random

ROOMS = ("kitchen", "bedroom", "garage", "office", "hall", "garden")
DEVICES = ("light", "lamp", "heater", "fan", "radio", "television", "oven", "camera")
OPENINGS = ("door", "window", "gate", "curtain")
OBJECTS = ("ball", "cup", "box", "bottle", "book", "key")
COLOURS = ("red", "green", "blue", "yellow", "white", "black")
NUMBERS = (
    *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("twenty", "thirty", "forty", "fifty"),
)
DIRECTIONS = ("left", "right", "around", "back")

# {A} is replaced by a random word of the list A above.
TEMPLATES = (
    "turn on the {DEVICES} in the {ROOMS}",
    "turn off the {DEVICES} in the {ROOMS}",
    "switch the {ROOMS} {DEVICES} on",
    "switch the {ROOMS} {DEVICES} off",
    "please turn the {DEVICES} off",
    "make the {ROOMS} light {COLOURS}",
    "set the {DEVICES} to {NUMBERS}",
    "set a timer for {NUMBERS} minutes",
    "wake me in {NUMBERS} hours",
    "open the {ROOMS} {OPENINGS}",
    "close the {ROOMS} {OPENINGS}",
    "lock the {OPENINGS} now",
    "is the {OPENINGS} open",
    "go to the {ROOMS} and stop",
    "drive {NUMBERS} metres and turn {DIRECTIONS}",
    "turn {DIRECTIONS} and wait {NUMBERS} seconds",
    "bring me the {COLOURS} {OBJECTS}",
    "find the {COLOURS} {OBJECTS} in the {ROOMS}",
    "put the {OBJECTS} in the {COLOURS} box",
    "take the {OBJECTS} to the {ROOMS}",
    "show the {ROOMS} camera please",
    "play music in the {ROOMS}",
    "stop the music now",
    "call {NUMBERS} {NUMBERS} {NUMBERS}",
)

_LISTS = {
    "ROOMS": ROOMS,
    "DEVICES": DEVICES,
    "OPENINGS": OPENINGS,
    "OBJECTS": OBJECTS,
    "COLOURS": COLOURS,
    "NUMBERS": NUMBERS,
    "DIRECTIONS": DIRECTIONS,
}


def draw_command(rng: random.Random) -> str:
    """One sentence, lower case, words separated by single spaces."""
    words = []
    for word in rng.choice(TEMPLATES).split():
        choices = _LISTS[word[1:-1]] if word.startswith("{") else (word,)
        words.append(rng.choice(choices))
    return " ".join(words)


def vocabulary() -> list[str]:
    """Every word of the grammar, sorted."""
    words = {word for template in TEMPLATES for word in template.split() if word[0] != "{"}
    return sorted(words.union(*_LISTS.values()))
