"""What a compiled program moves, read from its text."""

import math
import re

# Name, type and operation of a line, and what its operation takes.
_LINE = re.compile(r"\s*(?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\(([^)]*)\)")
_ON_CHIP = re.compile(r"\[[\d,]*\]\{[^{}]*S\(1\)\}")  # memory space 1 is a TPU's VMEM
_LAYOUT = re.compile(r"(?<=\])\{[^{}]*\}")
_ARRAY = re.compile(r"(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_ALIASES, _ALIAS = "output_to_operand_aliasing=", re.compile(r"\{\d*\}: \(\d+, \{\}\)")

_COLLECTIVES = r"all-gather|all-reduce|all-to-all|collective-\w+|ragged-all-to-all|reduce-scatter"
_COLLECTIVE = re.compile(rf" ({_COLLECTIVES})(?:-start)?\(")
_ALLOCATES = 'custom_call_target="AllocateBuffer"'
_MOVES_NOTHING = {"bitcast", "constant", "get-tuple-element", "parameter", "tuple"}


def moved_bytes(text: str) -> int:
    """Bytes of the device's memory that the operations of the entry computation read and write.

    Each reads its operands once and writes its results once; one that works in place does both with
    the same memory. What lies in the memory of the chip itself costs nothing. An asynchronous copy
    or slice counts where it ends: what it writes it has read.
    """
    entry = text[text.index("\nENTRY ") :]
    lines = entry[: entry.index("\n}")].splitlines()[2:]
    size, taken, moved = {}, {}, 0
    for line in lines:
        match = _LINE.match(_LAYOUT.sub("", line))
        off_chip = _LINE.match(_LAYOUT.sub("", _ON_CHIP.sub("[0]", line)))
        if match is None or off_chip is None:
            continue
        name, kind, op, operands = off_chip.groups()
        size[name], taken[name] = type_bytes(kind), re.findall(r"%([\w.-]+)", operands)
        if op.endswith("-done"):
            (start,) = taken[name]
            both = type_bytes(match[2])
            moved += size[name] + (both if size[taken[start][0]] else 0)
        elif _ALLOCATES in line:
            size[name] = 0  # nothing is in it to be read
        elif op not in _MOVES_NOTHING and not op.endswith("-start"):
            moved += size[name] + sum(size[operand] for operand in taken[name])
    return moved


def type_bytes(kind: str) -> int:
    """Bytes of a type, such as ``f32[4,8]``, or of all arrays of a tuple of types."""
    bits = 0
    for _, width, axes in _ARRAY.findall(kind):
        bits += int(width or 8) * math.prod(int(n) for n in axes.split(",") if n)
    return bits // 8


def calls(text: str, target: str) -> list[int]:
    """For every call of a custom target, how many results take the memory of an operand."""
    lines = [line for line in text.splitlines() if f'custom_call_target="{target}"' in line]
    return [len(_ALIAS.findall(line.partition(_ALIASES)[2])) for line in lines]


def collectives(text: str) -> list[str]:
    """Names of all operations that move something between devices."""
    return _COLLECTIVE.findall(text)
