"""The named formats, as values: a new one is a line here."""

from qstate.numerics._codebook import Codebook, dynamic_map
from qstate.numerics._minifloat import Minifloat

F32 = Minifloat("f32", 8, 23, specials="ieee", native="float32")
BF16 = Minifloat("bf16", 8, 7, specials="ieee", native="bfloat16")
F16 = Minifloat("f16", 5, 10, specials="ieee", native="float16")
E4M3 = Minifloat("e4m3", 4, 3, specials="nan")
E5M2 = Minifloat("e5m2", 5, 2, specials="ieee")
E2M1 = Minifloat("e2m1", 2, 1)
UE2M2 = Minifloat("ue2m2", 2, 2, signed=False)
UE4M4 = Minifloat("ue4m4", 4, 4, signed=False)
INT8 = Minifloat("int8", 0, 7, bias=-6)
DYNAMIC8 = Codebook("dynamic8", dynamic_map(7, 8, signed=True))
UDYNAMIC8 = Codebook("udynamic8", dynamic_map(7, 8, signed=False))
DYNAMIC4 = Codebook("dynamic4", dynamic_map(3, 4, signed=True))
ULINEAR4 = Codebook("ulinear4", tuple((k + 1) / 16 for k in range(16)))

FORMATS = {
    format.name: format
    for format in (
        F32,
        BF16,
        F16,
        E4M3,
        E5M2,
        E2M1,
        UE2M2,
        UE4M4,
        INT8,
        DYNAMIC8,
        UDYNAMIC8,
        DYNAMIC4,
        ULINEAR4,
    )
}
