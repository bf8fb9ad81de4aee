// From a caller's arguments to blocks, as blocks.py has it: slots are cut into runs of consecutive slots within a block of
// the cache, and blocks are named. What is not as it should be is told as such, and Python says what it is.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "plan.hpp"
#include "wire.hpp"

namespace {

bool has_twice(std::vector<int64_t>& values) {
    if (std::adjacent_find(values.begin(), values.end(), std::greater_equal<>()) == values.end()) {
        return false;  // in order, as most are
    }
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

// What a caller gave. hashes, counts: [num]; is_signed: whether the hashes are.
struct EmsGiven {
    const int64_t* slots;
    int64_t num_slots;
    const uint64_t* hashes;
    const int64_t* counts;
    int64_t num;
    int64_t is_signed;
};

}  // extern "C"

namespace {

// With the memory that it names.
struct Planned : EmsPlan {
    std::vector<ems::Run> runs;
    std::vector<int64_t> edges, bytes;
    std::vector<uint8_t> names;
};

bool are_tokens(const EmsGiven& given) {
    int64_t total = 0;
    for (int64_t i = 0; i < given.num; i++) {
        if (given.counts[i] < 1 || given.counts[i] > given.num_slots - total) {
            return false;
        }
        total += given.counts[i];
    }
    return given.num > 0 && total == given.num_slots;
}

}  // namespace

extern "C" {

// The caller closes it. Null when something is not as it should be.
EmsPlan* ems_plan(const EmsCache* cache, const EmsGiven* given) {
    if (!are_tokens(*given)) {
        return nullptr;
    }
    const auto num = static_cast<size_t>(given->num);
    auto plan = std::make_unique<Planned>();
    plan->runs.resize(static_cast<size_t>(given->num_slots));
    plan->edges.resize(num + 1);
    if (ems_cut(given->slots, given->num_slots, given->counts, given->num, cache->block_size, cache->num_slots,
                plan->runs.data(), plan->edges.data()) < 0) {
        return nullptr;
    }
    plan->bytes.resize(num);
    std::transform(given->counts, given->counts + num, plan->bytes.begin(),
                   [&](int64_t count) { return count * cache->token_bytes; });
    plan->names.resize(num * ems::kKeyBytes);
    ems_hash_names(cache->sha256, cache->base, cache->num_base, given->hashes, static_cast<int>(given->is_signed),
                   reinterpret_cast<const uint64_t*>(given->counts), 1, given->num, plan->names.data());
    plan->blocks = {cache->tensors, cache->num_tensors, 1, plan->runs.data(), plan->edges.data(), given->num};
    plan->keys = plan->names.data();
    plan->sizes = plan->bytes.data();
    plan->largest = *std::max_element(plan->bytes.begin(), plan->bytes.end());
    return plan.release();
}

void ems_plan_close(EmsPlan* plan) { delete static_cast<Planned*>(plan); }

}  // extern "C"
