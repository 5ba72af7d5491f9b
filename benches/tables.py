#!/usr/bin/env python3
"""Writes the figures of README.md and of the guide's pages `performance` and `model`, from the lines that benches printed.

    python3 benches/tables.py            writes what changed
    python3 benches/tables.py --check    writes nothing; exit status 1 if a figure is not what the lines say

`benches/tables.md` has the blocks, each under a heading with its name, with `{line}` where a figure goes: `{a.us}` is the
median of all lines `a.us`, `{a.us/1000}` a thousandth, `{a.us / b.us}` and `{a.us - b.us}` of two. Three digits are shown.
A block none of whose lines was measured yet has a dash for each.
The lines are those of RESULTS: each file of one machine, and all but the encoder's of one commit. A block replaces what is between
`<!-- figures: NAME -->` and `<!-- end of figures -->` in a document.
"""
import pathlib
import re
import statistics
import sys

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = ["h200.txt", "peers.txt", "partitions.txt", "encoder.txt"]
GUIDE = HERE.parent / "src" / "guide"
DOCUMENTS = [HERE.parent / "README.md", GUIDE / "performance.md", GUIDE / "model.md"]
PART = re.compile(r"(<!-- figures: ([\w ]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
FIGURE = re.compile(r"\{([\w.]+)(?:(/[0-9]+)| ([-/]) ([\w.]+))?\}")


def main():
    lines, blocks = read_lines(), read_blocks()
    stale = []
    for path in DOCUMENTS:
        text = path.read_text()
        fresh = PART.sub(lambda part: part[1] + filled(blocks[part[2]], lines) + part[3], text)
        if fresh != text:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(fresh)
    print("as the lines say" if not stale else f"{'stale' if '--check' in sys.argv else 'written'}: {', '.join(stale)}")
    return 1 if stale and "--check" in sys.argv else 0


def read_lines():
    """The values of every line, by its name."""
    lines = {}
    for name in RESULTS:
        for line in (HERE / "results" / name).read_text().splitlines():
            words = line.split()
            if len(words) == 3 and line[0] not in "#=":
                lines.setdefault(words[0], []).append(float(words[1]))
    return lines


def read_blocks():
    parts = re.split(r"^# (.+)\n", (HERE / "tables.md").read_text(), flags=re.MULTILINE)
    return {name: text.strip("\n") + "\n" for name, text in zip(parts[1::2], parts[2::2])}


def filled(block, lines):
    if not any(name in lines for figure in FIGURE.findall(block) for name in (figure[0], figure[3])):
        return FIGURE.sub("–", block)

    def value(name):
        if name not in lines:
            sys.exit(f"no line {name} in {', '.join(RESULTS)}")
        return statistics.median(lines[name])

    def figure(found):
        number = value(found[1])
        if found[2]:
            number /= int(found[2][1:])
        elif found[3]:
            number = number - value(found[4]) if found[3] == "-" else number / value(found[4])
        return shown(number)

    return FIGURE.sub(figure, block)


def shown(number):
    """Three digits, all of those in front of the point, and at most three behind it."""
    if number == 0:
        return "0"
    size = abs(number)
    decimals = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.0995 else 3
    return f"{number:,.{decimals}f}"


if __name__ == "__main__":
    sys.exit(main())
