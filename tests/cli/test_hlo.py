"""The reader of a program's text, on a text written by hand."""

import pytest

from qstate.cli._hlo import calls, collectives, moved_bytes, type_bytes

TEXT = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8,16]{1,0})->u8[]}

%fused (p: f32[8,16]) -> f32[8,16] {
  %p = f32[8,16]{1,0} parameter(0)
  ROOT %inside = f32[8,16]{1,0} negate(%p)
}

ENTRY %main.1 (x.1: f32[8,16], codes.1: u8[8,16], scales: f32[8,2]) -> (f32[8,16], u8[8,16]) {
  %x.1 = f32[8,16]{1,0:T(8,128)} parameter(0), sharding={replicated}
  %codes.1 = u8[8,16]{1,0:T(32,128)(4,1)} parameter(1)
  %scales = f32[8,2]{0,1:T(8,128)} parameter(2)
  %constant.5 = u32[2,1]{1,0} constant({ {1}, {2} })
  %start = ((f32[8,2]{0,1:T(8,128)}), f32[8,1]{0,1:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%scales)
  %negated-x = f32[8,16]{1,0:T(8,128)} fusion(%x.1), kind=kLoop, calls=%fused
  %done = f32[8,1]{0,1:T(8,128)S(1)} slice-done(%start)
  %flat = u8[128]{0} bitcast(%codes.1)
  %call.1 = (f32[8,16]{1,0:T(8,128)}, u8[128]{0}) custom-call(%negated-x, /*index=1*/%flat, %done),\
 custom_call_target="kernel", output_to_operand_aliasing={{1}: (1, {})}, metadata={op_name="f(x)"}
  %get-tuple-element.1 = f32[8,16]{1,0} get-tuple-element(%call.1), index=0
  %get-tuple-element.2 = u8[128]{0} get-tuple-element(%call.1), index=1
  %back.3 = u8[8,16]{1,0} bitcast(%get-tuple-element.2)
  ROOT %tuple.4 = (f32[8,16]{1,0}, u8[8,16]{1,0}) tuple(%get-tuple-element.1, %back.3)
}
"""
NEGATION = 2 * 512
SLICE = 32  # read; written on the chip
KERNEL = 2 * (512 + 128)  # codes in place: once read, once written


def test_bytes_of_a_program():
    assert moved_bytes(TEXT) == NEGATION + SLICE + KERNEL


def test_without_memory_on_the_chip():
    assert moved_bytes(TEXT.replace("S(1)", "")) == NEGATION + 2 * SLICE + KERNEL + SLICE


def test_a_copy_adds_its_bytes():
    copied = TEXT.replace("%back.3 = u8[8,16]{1,0} bitcast", "%back.3 = u8[8,16]{1,0} copy")
    assert moved_bytes(copied) == moved_bytes(TEXT) + 2 * 128


def test_memory_that_is_made_moves_nothing():
    made = '  %new = f32[8,16]{1,0} custom-call(), custom_call_target="AllocateBuffer"\n'
    line = "  %call.1 = "
    taken = TEXT.replace(line, made + line).replace("%flat, %done)", "%flat, %done, %new)")
    assert "%new)" in taken
    assert moved_bytes(taken) == moved_bytes(TEXT)


def test_calls_of_a_target_and_their_aliases():
    assert calls(TEXT, "kernel") == [1]
    assert calls(TEXT.replace("{{1}: (1, {})}", "{{0}: (0, {}), {1}: (1, {})}"), "kernel") == [2]
    assert calls(TEXT.replace("output_to_operand_aliasing={{1}: (1, {})}, ", ""), "kernel") == [0]
    assert calls(TEXT, "other") == []


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("f32[]", 4),
        ("pred[3]", 3),
        ("bf16[2,3]", 12),
        ("u4[6]", 3),
        ("f8e4m3fn[5]", 5),
        ("((f32[8,2]), s32[1], token[])", 68),
    ],
)
def test_bytes_of_a_type(kind, size):
    assert type_bytes(kind) == size


def test_collectives():
    assert collectives(TEXT) == []
    done = (
        "  %r = f32[8,2]{0,1} all-reduce-start(%scales), to_apply=%sum\n  %a = f32[] all-gather(%x)"
    )
    assert collectives(TEXT + done) == ["all-reduce", "all-gather"]
