"""The forms in which numbers of quantised files are kept in memory without loss."""

# Form -> bits a weight in memory, scales included; numbers and runs as in rank/kernels/cpu/layout.hpp.
#   int4, int5          0 .. 15 and 0 .. 31, with minimums
#   int8, int8_min      0 .. 255 for -128 .. 127, without and with minimums
#   int8_channel        as int8, one float32 scale a channel (not counted); activations have one a token
#   iq4, fp4            numbers of IQ4_NL's and of E2M1's table, the latter doubled
#   fp4_16              as fp4, runs of 16
#   int1                0 and 1 for -1 and 1, runs of 128
#   int2, int2_256      0 .. 3 for -1 .. 2, runs of 64 and 256
# Scales of the next ones, and minimums, are small integers, multiples of the factors of their 256 neighbours:
#   int2_k              0 .. 3, with minimums, runs of 16, scales and minimums 0 .. 15
#   int3_k              0 .. 7 for -4 .. 3, runs of 16, scales -32 .. 31
#   int4_k, int5_k      as int4 and int5, scales and minimums 0 .. 63
#   int6_k              0 .. 63 for -32 .. 31, runs of 16, scales -128 .. 127
#   iq1, iq2, iq3       numbers of a table of the type, signs above sizes; scales 1, 3, .. 31; runs of 16 in iq1_m,
#                       iq2_xs and iq2_s; eight neighbours in iq1 and iq2 are a point of the type's grid
BY_CHANNEL = "int8_channel"
FORM_BITS = {
    "int4": 5.0,
    "int5": 6.0,
    "int8": 8.5,
    "int8_min": 9.0,
    BY_CHANNEL: 8.0,
    "iq4": 4.5,
    "fp4": 4.5,
    "fp4_16": 5.0,
    "int1": 1.125,
    "int2": 2.25,
    "int2_256": 2.0625,
    "int2_k": 2.625,
    "int3_k": 3.4375,
    "int4_k": 4.5,
    "int5_k": 5.5,
    "int6_k": 6.5625,
    "iq1_s": 1.6875,
    "iq1_m": 1.8125,
    "iq2_xxs": 2.1875,
    "iq2_xs": 2.4375,
    "iq2_s": 2.5625,
    "iq3_xxs": 4.1875,
    "iq3_s": 4.1875,
}
CHANNEL_COLS = 1 << 17  # of int8_channel at most: sums of so many products of 127 and 128 are below 2^31


def number_bits(form: str) -> int:
    """Bits of one number in this form, without scales, as its name tells them."""
    return int(next(letter for letter in form if letter.isdigit()))
