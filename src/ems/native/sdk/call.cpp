// Carries out a plain call from its Python arguments to its result in one C++ call. The interpreter lock is held only
// while the arguments are read. Calls that are not plain, or need something that the link does not have yet, are left
// to Python before anything is sent.
#include <numeric>

#include "given.hpp"
#include "line.hpp"

namespace {

// Returned instead of an errno, like kUnexpected.
constexpr int kNotPlain = -4;  // the call is left to Python; nothing was sent
constexpr int kPartly = -5;    // Python must continue the call or report its result
constexpr int64_t kNoRoom = 6;  // of messages.py: the cause for which a load found no more blocks

// The next call reuses the memory of one with at most so many slots (about 3 MiB), and frees that of a larger one.
constexpr int64_t kKeptSlots = 1 << 16;

}  // namespace

extern "C" {

// State that the calls over one link share; mirrored in calls.py. Python writes it and reads the result of the last
// call.
struct EmsCalls {
    const EmsPython* python;
    const EmsCache* cache;
    const ems::Xxh3* xxh3;
    EmsLine* line;
    int64_t max_block_bytes;
    int64_t region_bytes;  // about the bytes of the staging area for the blocks of one message
    int64_t num_regions;   // most regions
    int64_t first_bytes;
    int64_t is_direct;  // blocks are saved without a staging area
    // The staging area, its size, and the size that was requested.
    uint8_t* arena;
    int64_t arena_bytes;
    int64_t arena_asked;
    // The mapped segments, and the pool's counter of given-back segments when they were mapped.
    const EmsSegment* mapped;
    int64_t num_mapped;
    int64_t num_given_back;
    // The last call.
    int64_t total;  // blocks of the call
    int64_t count;  // blocks that were loaded or saved, or exist
    int64_t done_bytes;
    EmsLoad load;
    EmsSave save;
};

// Options of a call.
struct EmsHow {
    int64_t deadline_ns;
    int64_t is_local;
    int64_t write_rcache;
};

}  // extern "C"

namespace {

class Calls : public EmsCalls {
  public:
    explicit Calls(const EmsCalls& kept) : EmsCalls(kept) {}

    Calls& begin_call(const EmsHow& how) {
        if (given_.slots.size() > kKeptSlots) {
            given_ = {};
            plan_ = {};
        }
        total = count = done_bytes = 0;
        line->deadline_ns = how.deadline_ns;
        return *this;
    }

    int run_load(PyObject* const* given, const EmsHow& how) {
        if (!given_.read(*python, given)) {
            return kNotPlain;
        }
        const ems::Unlocked unlocked(*python);
        return plan_.make(*cache, given_) ? run_load(plan_, how) : kNotPlain;
    }

    int run_load(const EmsPlan& plan, const EmsHow& how) {
        if (!begin(plan) || total > ems::kMaxKeys) {
            return kNotPlain;
        }
        load = EmsLoad{};
        load.plan = &plan;
        load.num = total;
        load.is_local = how.is_local;
        load.xxh3 = xxh3;
        load.mapped = mapped;
        load.num_mapped = num_mapped;
        load.num_given_back = num_given_back;
        load.corrupt = -1;
        const int problem = ems_line_load(line, &load);
        count = load.num_done;
        done_bytes = std::accumulate(plan.sizes, plan.sizes + count, int64_t{0});
        const bool is_cut = load.cause == kNoRoom && load.corrupt < 0 && count > 0 && count < load.num;
        return problem == 0 && is_cut ? kPartly : problem;
    }

    int run_save(PyObject* const* given, const EmsHow& how) {
        if (!given_.read(*python, given)) {
            return kNotPlain;
        }
        const ems::Unlocked unlocked(*python);
        return plan_.make(*cache, given_) ? run_save(plan_, how) : kNotPlain;
    }

    int run_save(const EmsPlan& plan, const EmsHow& how) {
        if (!begin(plan) || plan.largest > max_block_bytes) {
            return kNotPlain;
        }
        save = EmsSave{};
        save.plan = &plan;
        save.num = total;
        save.is_chain = 1;
        save.problem = -1;
        if (is_direct != 0) {
            save.xxh3 = xxh3;
            save.mapped = mapped;
            save.num_mapped = num_mapped;
            save.num_given_back = num_given_back;
        } else if (!stage(plan.largest)) {
            return kNotPlain;
        }
        save.write_rcache = how.write_rcache;
        const int problem = ems_line_save(line, &save);
        count = save.num_success;
        done_bytes = save.done_bytes;
        return problem == 0 && (save.problem >= 0 || save.num_local > 0) ? kPartly : problem;
    }

    // Sets the save's part of the staging area; false = that is too small.
    bool stage(int64_t largest_block) {
        const int64_t largest = ems::aligned(largest_block);
        const int64_t wanted = std::max(largest, std::min(region_bytes, largest * ems::kGroupBlocks)) * num_regions;
        if (arena == nullptr || arena_asked < wanted || arena_bytes < largest) {
            return false;
        }
        const int64_t num = std::min(num_regions, arena_bytes / largest);
        save.arena = arena;
        save.region_bytes = arena_bytes / num / ems::kAlign * ems::kAlign;
        save.num_regions = num;
        save.first_bytes = first_bytes;
        return true;
    }

    // Exists, for blocks that are full.
    int run_exists(PyObject* hashes, const EmsHow& how) {
        if (!given_.hashes.read(*python, hashes, true)) {
            return kNotPlain;
        }
        const ems::Unlocked unlocked(*python);
        if (!is_usable()) {
            return kNotPlain;
        }
        const int64_t num = given_.hashes.size();
        given_.counts.fill(static_cast<size_t>(num), cache->block_size);
        names_.resize(static_cast<size_t>(num) * ems::kKeyBytes);
        ems_hash_names(cache->sha256, cache->base, cache->num_base, given_.hashes.bits(), static_cast<int>(given_.hashes.is_signed()),
                       reinterpret_cast<const uint64_t*>(given_.counts.data()), 1, num, names_.data());
        return ems_line_exists(line, names_.data(), num, static_cast<int>(how.is_local), &count);
    }

  private:
    bool begin(const EmsPlan& plan) {
        total = plan.blocks.num_blocks;
        return is_usable();
    }

    // Whether the link is still connected and no unexpected data has arrived.
    bool is_usable() const { return static_cast<ems::Exchange*>(line)->is_idle(); }

    ems::Planned plan_{};
    ems::GivenBlocks given_;
    std::vector<uint8_t> names_;
};

}  // namespace

extern "C" {

// Opens the calls of a link. The caller must close the result, before the link; what `kept` points to must stay valid
// until then.
EmsCalls* ems_calls_open(const EmsCalls* kept) { return new Calls(*kept); }

void ems_calls_close(EmsCalls* calls) { delete static_cast<Calls*>(calls); }

// The following three must be called with the interpreter lock held. They return 0, a result of ems_line_load and the
// like, kNotPlain or kPartly.
int ems_call_load(EmsCalls* calls, PyObject* slots, PyObject* hashes, PyObject* counts, const EmsHow* how) {
    PyObject* const given[] = {slots, hashes, counts};
    return static_cast<Calls*>(calls)->begin_call(*how).run_load(given, *how);
}

int ems_call_save(EmsCalls* calls, PyObject* slots, PyObject* hashes, PyObject* counts, const EmsHow* how) {
    PyObject* const given[] = {slots, hashes, counts};
    return static_cast<Calls*>(calls)->begin_call(*how).run_save(given, *how);
}

int ems_call_exists(EmsCalls* calls, PyObject* hashes, const EmsHow* how) {
    return static_cast<Calls*>(calls)->begin_call(*how).run_exists(hashes, *how);
}

// The same for blocks that Python has planned; to be called without the interpreter lock.
int ems_call_load_plan(EmsCalls* calls, const EmsPlan* plan, const EmsHow* how) {
    return static_cast<Calls*>(calls)->begin_call(*how).run_load(*plan, *how);
}

int ems_call_save_plan(EmsCalls* calls, const EmsPlan* plan, const EmsHow* how) {
    return static_cast<Calls*>(calls)->begin_call(*how).run_save(*plan, *how);
}

}  // extern "C"
