"""The grammar of schemes, the packing of codes into bytes, and levels found by code and code by level."""

import itertools

import jax
import numpy as np
import pytest
from scipy.special import ndtri

from qjax.errors import UserError
from qjax.quant import formats
from qjax.quant.formats import FORMATS, NF4_LEVELS, Scheme, parse_scheme

_nearest_code = jax.jit(formats.nearest_code, static_argnums=1)
_pack = jax.jit(formats.pack, static_argnums=1)
_unpack = jax.jit(formats.unpack, static_argnums=(1, 2))

GRANULARITIES = ['', 'block=1', 'block=64', 'tile=4x2', 'tile=64x64', 'axis=channel', 'axis=tensor']
SCALES = ('', 'float32', 'bfloat16', 'e8m0', 'e4m3')


def _spellings():
  """Every combination of options in every order, with whether the grammar allows it."""
  for name, granularity, asym, dq, scale in itertools.product(
    FORMATS, GRANULARITIES, (False, True), (False, True), SCALES
  ):
    numbers = FORMATS[name]
    options = [granularity] if granularity else []
    options += ['asym'] * asym + ['dq'] * dq + ([f'scale={scale}'] if scale else [])
    if numbers.is_float:
      is_valid = not options
    else:
      has_blocks = granularity[:5] in ('block', 'tile=') or (not granularity and numbers.bits < 8)
      is_valid = not (asym and not numbers.is_integer) and not (dq and (asym or scale or not has_blocks))
      is_valid = is_valid and not (scale in ('e8m0', 'e4m3') and asym)
      is_valid = is_valid and not (scale == 'e8m0' and numbers.unit == 1)
    for order in itertools.permutations(options):
      yield name + (':' + ','.join(order) if order else ''), is_valid


# ---- the grammar -------------------------------------------------------------------------------------------


def test_every_spelling_round_trips_or_is_refused():
  seen = set()
  for spelling, is_valid in _spellings():
    if not is_valid:
      with pytest.raises(UserError):
        parse_scheme(spelling)
      continue
    scheme = parse_scheme(spelling)
    assert parse_scheme(str(scheme)) == scheme, spelling
    assert str(parse_scheme(str(scheme))) == str(scheme), spelling
    seen.add(scheme)
  # Six granularities, four of them with dq; integers have offsets beside two kinds of scales.
  for name, numbers in FORMATS.items():
    kinds = 3 + (numbers.unit != 1) + 2 * numbers.is_integer
    assert sum(scheme.format == name for scheme in seen) == (1 if numbers.is_float else 6 * kinds + 4), name


@pytest.mark.parametrize(
  'spelling, scheme, canonical',
  [
    ('int8', Scheme('int8', 'channel'), 'int8:axis=channel'),
    ('int4', Scheme('int4', 'block', 64), 'int4:block=64'),
    ('nf4', Scheme('nf4', 'block', 64), 'nf4:block=64'),
    ('nf4:dq', Scheme('nf4', 'block', 64, double_quantized=True), 'nf4:block=64,dq'),
    ('int4:asym', Scheme('int4', 'block', 64, asymmetric=True), 'int4:block=64,asym'),
    ('int8:asym', Scheme('int8', 'channel', asymmetric=True), 'int8:axis=channel,asym'),
    ('int8:axis=tensor', Scheme('int8', 'tensor'), 'int8:axis=tensor'),
    (
      'int4:scale=bfloat16,asym,block=32',
      Scheme('int4', 'block', 32, True, 'bfloat16'),
      'int4:block=32,asym,scale=bfloat16',
    ),
    ('nf4:block=32,scale=float32', Scheme('nf4', 'block', 32), 'nf4:block=32'),
    ('int8:tile=128x64', Scheme('int8', 'tile', 128, width=64), 'int8:tile=128x64'),
    ('fp8_e4m3', Scheme('fp8_e4m3', 'channel'), 'fp8_e4m3:axis=channel'),
    ('fp4:scale=e8m0,block=32', Scheme('fp4', 'block', 32, scale='e8m0'), 'fp4:block=32,scale=e8m0'),
    ('fp4:block=16,scale=e4m3', Scheme('fp4', 'block', 16, scale='e4m3'), 'fp4:block=16,scale=e4m3'),
    ('bfloat16', Scheme('bfloat16'), 'bfloat16'),
    ('float16', Scheme('float16'), 'float16'),
  ],
)
def test_spellings_and_their_meaning(spelling, scheme, canonical):
  assert parse_scheme(spelling) == scheme
  assert str(scheme) == canonical


@pytest.mark.parametrize(
  'spelling, reason',
  [
    ('nf5', "'nf5' is not a format; did you mean 'nf4'"),
    ('', "'' is not a format"),
    (' nf4', 'not a format'),
    ('NF4', 'not a format'),
    ('bfloat16:block=64', 'bfloat16 takes no options'),
    ('nf4:block=0', 'block=0 is not a whole number'),
    ('nf4:block=-64', 'block=-64 is not a whole number'),
    ('nf4:block=6.4', 'block=6.4 is not a whole number'),
    ('nf4:block', 'block= is not a whole number'),
    ('nf4:block=64,block=32', 'granularity is given twice'),
    ('nf4:block=64,axis=channel', 'granularity is given twice'),
    ('int8:asym,asym', 'asymmetric is given twice'),
    ('nf4:dq,dq', 'double_quantized is given twice'),
    ('nf4:scale=bfloat16,scale=float32', 'scale is given twice'),
    ('int8:axis=row', "option 'axis=row' is not known"),
    ('int8:scale=float16', "option 'scale=float16' is not known"),
    ('int8:asymmetric', "option 'asymmetric' is not known"),
    ('int8:asym=1', "option 'asym=1' is not known"),
    ('nf4:block=64,', "option '' is not known"),
    ('nf4:block=64, dq', "option ' dq' is not known"),
    ('nf4:asym', 'fixed table of levels and takes no offset'),
    ('int8:dq', 'dq quantizes the scales of blocks'),
    ('nf4:axis=channel,dq', 'dq quantizes the scales of blocks'),
    ('int4:asym,dq', 'dq with asym'),
    ('nf4:dq,scale=bfloat16', 'dq already says'),
    ('int8:tile=64', 'tile=64 is not INPUTSxOUTPUTS'),
    ('int8:tile=0x4', 'tile=0x4 is not INPUTSxOUTPUTS'),
    ('int8:tile=4x4x4', 'tile=4x4x4 is not INPUTSxOUTPUTS'),
    ('nf4:scale=e8m0', 'lose up to half its range to scale=e8m0'),
    ('int8:asym,scale=e4m3', 'scale=e4m3 with asym is too coarse'),
  ],
)
def test_what_is_refused_says_why_and_shows_the_grammar(spelling, reason):
  with pytest.raises(UserError, match=reason) as caught:
    parse_scheme(spelling)
  assert repr(spelling) in str(caught.value)
  assert formats.GRAMMAR in str(caught.value)


def test_a_block_is_never_longer_than_the_inputs():
  assert [parse_scheme('nf4:block=64').block_of(k) for k in (5, 64, 65)] == [5, 64, 64]
  assert [parse_scheme(f'int8:axis={axis}').block_of(65) for axis in ('channel', 'tensor')] == [65, 65]


# ---- packing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('bits', [2, 4])
def test_unpack_undoes_pack_for_every_number_of_rows(bits):
  rng = np.random.default_rng(bits)
  for rows in (1, 2, 5, 8, 13):
    codes = rng.integers(0, 2**bits, (2, rows, 3), dtype=np.uint8)
    packed = _pack(codes, bits)
    assert packed.dtype == np.uint8 and packed.shape == (2, -(-rows * bits // 8), 3)
    np.testing.assert_array_equal(_unpack(packed, bits, rows), codes)


def test_a_byte_holds_a_row_of_each_half_the_first_in_its_low_bits():
  codes = np.arange(1, 6, dtype=np.uint8).reshape(5, 1)
  np.testing.assert_array_equal(formats.pack(codes, 4), [[0x41], [0x52], [0x03]])


def test_leading_axes_pack_independently():
  codes = np.random.default_rng(0).integers(0, 16, (2, 3, 7, 2), dtype=np.uint8)
  packed = np.asarray(_pack(codes, 4))
  for index in itertools.product(range(2), range(3)):
    np.testing.assert_array_equal(packed[index], _pack(codes[index], 4))


# ---- levels ------------------------------------------------------------------------------------------------


def test_nf4_levels_are_quantiles_of_the_normal_distribution():
  # Dettmers et al. 2023, appendix E: the tail that is left out averages those of 15 and of 16 levels a side.
  offset = 1 - (1 / 32 + 1 / 30) / 2
  positive = ndtri(np.linspace(offset, 0.5, 9)[:-1])
  negative = -ndtri(np.linspace(offset, 0.5, 8)[:-1])
  levels = np.sort(np.concatenate([negative, [0], positive])) / positive.max()
  np.testing.assert_allclose(NF4_LEVELS, levels, atol=2e-7)  # The published table was computed in float32.


@pytest.mark.parametrize('name', [name for name, format in FORMATS.items() if format.levels])
def test_a_table_ascends_spans_one_and_holds_zero(name):
  levels = FORMATS[name].levels
  # Minus zero is no level of its own.
  assert len(levels) == 2 ** FORMATS[name].bits - ('fp4' in name)
  assert list(levels) == sorted(set(levels))
  assert levels[0] == -1 and levels[-1] == 1 and 0 in levels


def test_the_nearest_code_is_the_nearest_by_brute_force():
  levels = np.asarray(NF4_LEVELS, np.float32)
  midpoints = (levels[1:] + levels[:-1]) / 2
  beside = [np.nextafter(midpoints, np.float32(side)) for side in (-2, 2)]
  uniform = np.random.default_rng(0).uniform(-1.2, 1.2, 1000)
  x = np.concatenate([uniform, midpoints, *beside, levels, [-np.inf, np.inf]]).astype(np.float32)
  codes = np.asarray(_nearest_code(x, NF4_LEVELS))
  assert codes.dtype == np.uint8
  # Half-way points in the table's own float32, as everything else; the first of equals is the lower level.
  is_above = x[:, None] > midpoints
  np.testing.assert_array_equal(codes, is_above.sum(-1))
  finite = np.isfinite(x)
  distance = np.abs(x[finite, None].astype(np.float64) - levels)
  chosen = np.take_along_axis(distance, codes[finite, None].astype(int), -1)[:, 0]
  assert (chosen <= distance.min(-1) + 2**-24).all()
  np.testing.assert_array_equal(_nearest_code(midpoints, NF4_LEVELS), np.arange(15))
  np.testing.assert_array_equal(_nearest_code(levels, NF4_LEVELS), np.arange(16))


def test_gather_and_select_tree_and_the_table_agree_bit_for_bit():
  codes = np.random.default_rng(1).integers(0, 16, (5, 7), dtype=np.uint8)
  codes[0, :] = 15
  expected = np.asarray(NF4_LEVELS, np.float32)[codes].view(np.uint32)
  for lookup in (formats._lookup, formats._select_tree, formats.level_of):
    for fn in (lookup, jax.jit(lookup, static_argnums=1)):
      out = np.asarray(fn(codes, NF4_LEVELS))
      np.testing.assert_array_equal(out.view(np.uint32), expected)


@pytest.mark.parametrize('platform, primitive', [('cpu', 'gather'), ('tpu', 'select')])
def test_each_platform_gets_the_lookup_that_is_fast_there(platform, primitive):
  lowered = jax.jit(formats.level_of, static_argnums=1).trace(np.zeros((3, 2), np.uint8), NF4_LEVELS)
  text = lowered.lower(lowering_platforms=(platform,)).as_text()
  assert (f'stablehlo.{primitive}' in text) and ('gather' in text) == (platform == 'cpu')
