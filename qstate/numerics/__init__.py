"""What a number becomes: formats, scalings, roundings, packing and random bits, on plain arrays."""

from qstate.numerics._blocks import Blocks, block_layout
from qstate.numerics._codebook import Codebook, dynamic_map
from qstate.numerics._codec import (
    Scales,
    blocks_of,
    decode,
    decode_by_half,
    decode_scaled,
    decode_unscaled,
    encode,
    encode_scaled,
    encode_unpacked,
    encode_unscaled,
    magnitudes,
    packed,
    unpacked,
)
from qstate.numerics._format import Format
from qstate.numerics._formats import (
    BF16,
    DYNAMIC4,
    DYNAMIC8,
    E2M1,
    E4M3,
    E5M2,
    F16,
    F32,
    FORMATS,
    INT8,
    UDYNAMIC8,
    UE2M2,
    UE4M4,
    ULINEAR4,
)
from qstate.numerics._minifloat import Minifloat
from qstate.numerics._packing import pack, unpack
from qstate.numerics._random_bits import (
    element_bits,
    half_word,
    key_words,
    place_seeds,
    place_words,
    random_bits,
    split_key,
)
from qstate.numerics._scale_formats import SCALE_DTYPES, narrow_scale, scale_number, widen_scale
from qstate.numerics._scaling import Block, Delayed, NoScale, PerTensor, Rank1, Scaling
from qstate.numerics._storage import Storage, storage
