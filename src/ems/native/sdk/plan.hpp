// The blocks of a call, as planned in C++ (plan.cpp, names.cpp) or in Python (blocks.py, keys.py).
#pragma once

#include <vector>

#include "blocks.hpp"
#include "given.hpp"

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

// A registered cache without layer groups, and what the names of its blocks begin with.
struct EmsCache {
    const ems::Tensor* tensors;
    int64_t num_tensors;
    int64_t token_bytes;  // of all tensors
    int64_t block_size;
    int64_t num_slots;
    const EmsSha256* sha256;
    const uint8_t* base;
    int64_t num_base;
};

}  // extern "C"

namespace ems {

// With the memory that it names, which serves one call after the other.
class Planned : public EmsPlan {
  public:
    // Whether the caller's arguments are valid; if not, it is unusable until the next call.
    bool make(const EmsCache& cache, const GivenBlocks& given);

  private:
    std::vector<Run> runs_;
    std::vector<int64_t> edges_, bytes_;
    std::vector<uint8_t> names_;
};

}  // namespace ems
