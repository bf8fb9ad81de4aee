// The SDK's calls over a link, as line.cpp has them.
#pragma once

#include "plan.hpp"
#include "stream.hpp"

namespace ems {

constexpr int64_t kGroupBlocks = 64;  // of a message
constexpr int64_t kAlign = 64;        // of a block in the staging area

inline int64_t aligned(int64_t size) { return (size + kAlign - 1) / kAlign * kAlign; }

}  // namespace ems

extern "C" {

// A segment of the pool that is mapped here.
struct EmsSegment {
    int64_t number;
    const uint8_t* memory;
    int64_t bytes;
};

// Blocks to load: `num` of a plan's, from `first` on.
struct EmsLoad {
    const EmsPlan* plan;
    int64_t first;
    int64_t num;
    int64_t is_local;
    uint8_t* found;  // [num]: each that is there is loaded, and an EmsFound says so; null = the prefix is
    const ems::Xxh3* xxh3;
    const EmsSegment* mapped;
    int64_t num_mapped;
    int64_t num_given_back;  // when they were mapped; then as in the answer
    // The answer. segments [num_found]: until the link's next call.
    const int64_t* segments;
    int64_t num_found;
    int64_t lease;
    int64_t cause;
    int64_t is_asked;   // the answer has arrived: the call continues behind it
    int64_t num_done;   // blocks that were verified and written
    int64_t corrupt;    // the first that was damaged, or -1
};

// State of a block of a load that asks for each block; initially 0.
enum EmsFound : uint8_t { kUndecided = 0, kMissing = 1, kLoaded = 2 };

// Blocks to save: the first `num` of a plan's.
struct EmsSave {
    const EmsPlan* plan;
    int64_t num;
    const uint8_t* parent;  // the key before the first, or null
    uint8_t* arena;
    int64_t region_bytes;  // of the arena, for one message's blocks; a multiple of kAlign
    int64_t num_regions;
    int64_t first_bytes;  // of the first message, about; the next ones grow
    int64_t write_rcache;
    int64_t is_chain;   // each block follows the one before it
    uint8_t* statuses;  // [num]: result of each as far as known; or null
    // The answers, as Progress of pipeline.py counts them.
    int64_t num_done;  // blocks that have one
    int64_t done_bytes;
    int64_t num_success;  // up to the first that was not saved; of these, those on this node only
    int64_t num_local;
    int64_t problem;  // result of that one, or -1
};

int ems_line_exists(EmsLine* line, const uint8_t* keys, int64_t num, int is_local, int64_t* count);
int ems_line_load(EmsLine* line, EmsLoad* load);
int ems_line_save(EmsLine* line, EmsSave* save);

}  // extern "C"
