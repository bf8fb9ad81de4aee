// The SDK's calls over a link: load, save, exists (line.cpp).
#pragma once

#include <algorithm>

#include "plan.hpp"
#include "stream.hpp"

namespace ems {

constexpr int64_t kGroupBlocks = 64;  // most blocks of a save message
constexpr int64_t kAlign = 64;        // alignment of a block in the staging area

inline int64_t aligned(int64_t size) { return (size + kAlign - 1) / kAlign * kAlign; }

// Statuses of saved blocks, as in messages.py.
constexpr uint8_t kStored = 0, kConflict = 2, kLocal = 6;
inline bool is_success(uint8_t status) { return status <= kConflict || status == kLocal; }
inline bool are_known(const uint8_t* statuses, size_t num) {
    return std::all_of(statuses, statuses + num, [](uint8_t status) { return status <= kLocal; });
}

}  // namespace ems

extern "C" {

// A segment of the pool that is mapped into this process.
struct EmsSegment {
    int64_t number;
    const uint8_t* memory;
    int64_t bytes;
};

// A load of `num` blocks of a plan, from `first` on: its arguments, and its progress and result.
struct EmsLoad {
    const EmsPlan* plan;
    int64_t first;
    int64_t num;
    int64_t is_local;
    uint8_t* found;  // [num] EmsFound: every block that exists is loaded; null = only the longest prefix is loaded
    const ems::Xxh3* xxh3;
    const EmsSegment* mapped;
    int64_t num_mapped;
    int64_t num_given_back;  // input: the pool's counter when they were mapped; output: the counter in the answer
    // The answer. segments [num_found]: valid until the link's next call.
    const int64_t* segments;
    int64_t num_found;
    int64_t lease;
    int64_t cause;
    int64_t is_asked;   // the answer has arrived: a repeated call continues after it
    int64_t num_done;   // blocks that were verified and written
    int64_t corrupt;    // the first corrupt block, -1 = none
};

// State of a block in EmsLoad::found; initially kUndecided.
enum EmsFound : uint8_t { kUndecided = 0, kMissing = 1, kLoaded = 2 };

// A save of the first `num` blocks of a plan: its arguments, and its progress and result.
struct EmsSave {
    const EmsPlan* plan;
    int64_t num;
    const uint8_t* parent;  // the key before the first; null = none
    uint8_t* arena;         // the staging area; null = blocks are written to the pool's memory (direct.hpp)
    int64_t region_bytes;  // bytes of the arena for the blocks of one message; a multiple of kAlign
    int64_t num_regions;
    int64_t first_bytes;  // about the bytes of the first message; later ones grow
    int64_t write_rcache;
    int64_t is_chain;   // each block follows the one before it
    uint8_t* statuses;  // [num]: results of the answered blocks; null = not wanted
    // The answers, counted as Progress of pipeline.py does.
    int64_t num_done;  // answered blocks
    int64_t done_bytes;
    int64_t num_success;  // saved blocks before the first that was not saved
    int64_t num_local;    // of these, blocks that only this node holds
    int64_t problem;  // status of the first block that was not saved, -1 = all were
    // Of a save without a staging area: as EmsLoad has them. mapped: must be writable.
    const ems::Xxh3* xxh3;
    const EmsSegment* mapped;
    int64_t num_mapped;
    int64_t num_given_back;
    const int64_t* segments;
    int64_t num_found;
    int64_t is_asked;
};

}  // extern "C"

namespace ems {

// Counts the status of a save's next block.
inline void count(EmsSave& save, uint8_t status) {
    if (save.statuses != nullptr) {
        save.statuses[save.num_done] = status;
    }
    save.done_bytes += save.plan->sizes[save.num_done++];
    if (save.problem < 0 && is_success(status)) {
        save.num_success++;
        save.num_local += status == kLocal;
    } else if (save.problem < 0) {
        save.problem = status;
    }
}

// The segment of that number among the mapped ones; null = it is not mapped. last: the one that was found before.
inline const EmsSegment* find(const EmsSegment* mapped, int64_t num_mapped, int64_t number, const EmsSegment* last) {
    if (last != nullptr && last->number == number) {
        return last;
    }
    const EmsSegment* end = mapped + num_mapped;
    const auto* found = std::find_if(mapped, end, [&](const EmsSegment& one) { return one.number == number; });
    return found != end ? found : nullptr;
}

// Whether `length` bytes from `offset` on lie within the segment.
inline bool is_within(const EmsSegment& segment, int64_t offset, int64_t length) {
    return offset >= 0 && length >= 0 && length <= segment.bytes && offset <= segment.bytes - length;
}

}  // namespace ems

extern "C" {

int ems_line_exists(EmsLine* line, const uint8_t* keys, int64_t num, int is_local, int64_t* count);
int ems_line_load(EmsLine* line, EmsLoad* load);
int ems_line_save(EmsLine* line, EmsSave* save);

}  // extern "C"
