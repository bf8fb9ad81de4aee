// Turns a caller's arguments into blocks; the reference is blocks.py. Slots are divided into runs of consecutive slots
// within a block of the cache, and the blocks get their names. Invalid arguments are only reported as invalid; Python
// finds the reason.
#include <algorithm>
#include <cstdint>
#include <memory>

#include "plan.hpp"
#include "messages.hpp"

namespace {

bool has_twice(std::vector<int64_t>& values) {
    if (std::adjacent_find(values.begin(), values.end(), std::greater_equal<>()) == values.end()) {
        return false;  // strictly ascending, as most are
    }
    std::sort(values.begin(), values.end());
    return std::adjacent_find(values.begin(), values.end()) != values.end();
}

}  // namespace

extern "C" {

// Divides slots [num] into runs. counts: [num_blocks] tokens of each block, `num` in all. Output: runs, room for [num],
// and edges [num_blocks + 1], the index of each block's first run. Returns the number of runs; -1 if a slot is outside
// the cache or occurs twice.
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

namespace {

bool are_tokens(const ems::GivenBlocks& given) {
    int64_t total = 0;
    const int64_t *counts = given.counts.data(), num_slots = given.slots.size();
    for (int64_t i = 0; i < given.counts.size(); i++) {
        if (counts[i] < 1 || counts[i] > num_slots - total) {
            return false;
        }
        total += counts[i];
    }
    return given.counts.size() > 0 && total == num_slots;
}

}  // namespace

namespace ems {

bool Planned::make(const EmsCache& cache, const GivenBlocks& given) {
    if (!are_tokens(given)) {
        return false;
    }
    const int64_t *counts = given.counts.data(), num_blocks = given.counts.size(), num_slots = given.slots.size();
    const auto num = static_cast<size_t>(num_blocks);
    runs_.resize(static_cast<size_t>(num_slots));
    edges_.resize(num + 1);
    if (ems_cut(given.slots.data(), num_slots, counts, num_blocks, cache.block_size, cache.num_slots, runs_.data(),
                edges_.data()) < 0) {
        return false;
    }
    bytes_.resize(num);
    std::transform(counts, counts + num, bytes_.begin(), [&](int64_t count) { return count * cache.token_bytes; });
    names_.resize(num * kKeyBytes);
    ems_hash_names(cache.sha256, cache.base, cache.num_base, given.hashes.bits(),
                   static_cast<int>(given.hashes.is_signed()), given.counts.bits(), 1, num_blocks, names_.data());
    blocks = {cache.tensors, cache.num_tensors, 1, runs_.data(), edges_.data(), num_blocks};
    keys = names_.data();
    sizes = bytes_.data();
    largest = *std::max_element(bytes_.begin(), bytes_.end());
    return true;
}

}  // namespace ems

extern "C" {

// Makes a plan, which the caller must close; null if an argument is not plain or is invalid. The interpreter lock must
// be held.
EmsPlan* ems_plan(const EmsPython* python, const EmsCache* cache, PyObject* slots, PyObject* hashes, PyObject* counts) {
    PyObject* const all[] = {slots, hashes, counts};
    ems::GivenBlocks given;
    if (!given.read(*python, all)) {
        return nullptr;
    }
    const ems::Unlocked unlocked(*python);
    auto plan = std::make_unique<ems::Planned>();
    return plan->make(*cache, given) ? plan.release() : nullptr;
}

void ems_plan_close(EmsPlan* plan) { delete static_cast<ems::Planned*>(plan); }

}  // extern "C"
