// The blocks of a call, as planned in C++ (plan.cpp, names.cpp) or in Python (blocks.py, keys.py).
#pragma once

#include "blocks.hpp"

extern "C" {

// Of the library that Python's hashlib calls: addresses of its functions.
struct EmsSha256 {
    int (*init)(void* state);
    int (*update)(void* state, const void* data, size_t size);
    int (*final)(uint8_t* digest, void* state);
};

void ems_hash_names(const EmsSha256* sha256, const uint8_t* base, int64_t num_base, const uint64_t* values,
                    int is_signed, const uint64_t* counts, int64_t num_groups, int64_t num, uint8_t* out);

// Where they lie, their names, packed, and bytes of each and of the largest.
struct EmsPlan {
    ems::Batch blocks;
    const uint8_t* keys;
    const int64_t* sizes;
    int64_t largest;
};

}  // extern "C"
