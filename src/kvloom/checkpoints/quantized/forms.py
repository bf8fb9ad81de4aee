"""The forms in which the numbers of quantised files are kept in memory as they are."""

# Form -> bits a weight in memory, scales included; numbers and runs as in rank/kernels/cpu/layout.hpp.
#   int4, int5          0 .. 15 and 0 .. 31, with minimums
#   int6                0 .. 63 for -32 .. 31, runs of 16
#   int8, int8_min      0 .. 255 for -128 .. 127, without and with minimums
#   iq4, fp4            numbers of IQ4_NL's and of E2M1's table, the latter doubled
FORM_BITS = {"int4": 5.0, "int5": 6.0, "int6": 7.0, "int8": 8.5, "int8_min": 9.0, "iq4": 4.5, "fp4": 4.5}


def number_bits(form: str) -> int:
    """Of a number of the form, without scales."""
    return int(next(letter for letter in form if letter.isdigit()))
