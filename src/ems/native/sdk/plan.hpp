// The plan of a call: its blocks with their memory, names and sizes; made in C++ (plan.cpp, names.cpp) or in Python
// (blocks.py, keys.py).
#pragma once

#include <vector>

#include "blocks.hpp"
#include "given.hpp"

extern "C" {

// Addresses of the SHA-256 functions of the library that Python's hashlib calls.
struct EmsSha256 {
    int (*init)(void* state);
    int (*update)(void* state, const void* data, size_t size);
    int (*final)(uint8_t* digest, void* state);
};

void ems_hash_names(const EmsSha256* sha256, const uint8_t* base, int64_t num_base, const uint64_t* values,
                    int is_signed, const uint64_t* counts, int64_t num_groups, int64_t num, uint8_t* out);

// The blocks: their memory in the cache; keys: their names, packed; sizes: bytes of each; largest: bytes of the
// largest.
struct EmsPlan {
    ems::Batch blocks;
    const uint8_t* keys;
    const int64_t* sizes;
    int64_t largest;
};

// A registered KV cache without layer groups. base [num_base]: bytes that begin the hashed name of every block.
struct EmsCache {
    const ems::Tensor* tensors;
    int64_t num_tensors;
    int64_t token_bytes;  // bytes of a token in all tensors together
    int64_t block_size;
    int64_t num_slots;
    const EmsSha256* sha256;
    const uint8_t* base;
    int64_t num_base;
};

}  // extern "C"

namespace ems {

// A plan that owns its memory, which it reuses from call to call.
class Planned : public EmsPlan {
  public:
    // Makes the plan of a call; false = the arguments are invalid, and the plan must not be used.
    bool make(const EmsCache& cache, const GivenBlocks& given);

  private:
    std::vector<Run> runs_;
    std::vector<int64_t> edges_, bytes_;
    std::vector<uint8_t> names_;
};

}  // namespace ems
