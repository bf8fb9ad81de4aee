// From slots to runs, as blocks.py has it: each block is cut into runs of consecutive slots within a block of the cache.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "blocks.hpp"

namespace {

bool has_twice(std::vector<int64_t>& values) {
    std::sort(values.begin(), values.end());
    return std::adjacent_find(values.begin(), values.end()) != values.end();
}

}  // namespace

extern "C" {

// counts [num_blocks]: tokens of each block, which are `num` together. runs [num]; edges [num_blocks + 1]: where those of
// each block begin. Returns how many runs there are; -1 when a slot is not of the cache, or named more than once.
int64_t ems_cut(const int64_t* slots, int64_t num, const int64_t* counts, int64_t num_blocks, int64_t block_size,
                int64_t num_slots, ems::Run* runs, int64_t* edges) {
    int64_t num_runs = 0, token = 0;
    edges[0] = 0;
    for (int64_t block = 0; block < num_blocks; block++) {
        for (const int64_t end = token + counts[block]; token < end; token++) {
            const int64_t slot = slots[token];
            if (slot < 0 || slot >= num_slots) {
                return -1;
            }
            const bool goes_on = num_runs > edges[block] && slot == slots[token - 1] + 1 && slot % block_size != 0;
            if (goes_on) {
                runs[num_runs - 1].count++;
            } else {
                runs[num_runs++] = {slot / block_size, slot % block_size, 1};
            }
        }
        edges[block + 1] = num_runs;
    }
    std::vector<int64_t> values(static_cast<size_t>(num_runs));
    std::transform(runs, runs + num_runs, values.begin(), [](const ems::Run& run) { return run.number; });
    if (has_twice(values)) {  // several runs in one block may overlap
        values.assign(slots, slots + num);
        if (has_twice(values)) {
            return -1;
        }
    }
    return num_runs;
}

}  // extern "C"
