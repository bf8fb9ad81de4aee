// A plain call from what its caller gave to its result, in one step: Python's lock is held while the arguments are read,
// and not afterwards. What is not plain, or needs what the link does not have yet, is left to Python before anything is
// sent.
#include <numeric>

#include "given.hpp"
#include "line.hpp"

namespace {

// Instead of an error number, as kUnexpected.
constexpr int kNotPlain = -4;  // nothing was sent
constexpr int kPartly = -5;    // Python has something to do or to say
constexpr int64_t kNoRoom = 6;  // of messages.py: why a load found no more

constexpr int64_t kKeptSlots = 1 << 16;  // a call's memory serves the next one up to that: 3 MiB about

}  // namespace

extern "C" {

// State that calls over one link share. Python writes it, and reads the result of the last call.
struct EmsCalls {
    const EmsPython* python;
    const EmsCache* cache;
    const ems::Xxh3* xxh3;
    EmsLine* line;
    int64_t max_block_bytes;
    int64_t region_bytes;  // of the staging area, for one message's blocks, about
    int64_t num_regions;   // at most
    int64_t first_bytes;
    // The staging area, and how much was asked for.
    uint8_t* arena;
    int64_t arena_bytes;
    int64_t arena_asked;
    // The segments that are mapped, and how many had been given back then.
    const EmsSegment* mapped;
    int64_t num_mapped;
    int64_t num_given_back;
    // Of the last call.
    int64_t total;  // blocks
    int64_t count;  // that were loaded, saved, or exist
    int64_t done_bytes;
    EmsLoad load;
    EmsSave save;
};

// How a call is to be carried out.
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
        const int64_t largest = ems::aligned(plan.largest);
        const int64_t wanted = std::max(largest, std::min(region_bytes, largest * ems::kGroupBlocks)) * num_regions;
        if (arena == nullptr || arena_asked < wanted || arena_bytes < largest) {
            return kNotPlain;
        }
        const int64_t num = std::min(num_regions, arena_bytes / largest);
        save = EmsSave{};
        save.plan = &plan;
        save.num = total;
        save.arena = arena;
        save.region_bytes = arena_bytes / num / ems::kAlign * ems::kAlign;
        save.num_regions = num;
        save.first_bytes = first_bytes;
        save.write_rcache = how.write_rcache;
        save.is_chain = 1;
        save.problem = -1;
        const int problem = ems_line_save(line, &save);
        count = save.num_success;
        done_bytes = save.done_bytes;
        return problem == 0 && (save.problem >= 0 || save.num_local > 0) ? kPartly : problem;
    }

    // Of full blocks.
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

    // Whether the link is still connected, with nothing unexpected to be read.
    bool is_usable() const { return static_cast<ems::Exchange*>(line)->is_idle(); }

    ems::Planned plan_{};
    ems::GivenBlocks given_;
    std::vector<uint8_t> names_;
};

}  // namespace

extern "C" {

// The caller closes it, before the line. What `kept` has addresses of stays until then.
EmsCalls* ems_calls_open(const EmsCalls* kept) { return new Calls(*kept); }

void ems_calls_close(EmsCalls* calls) { delete static_cast<Calls*>(calls); }

// These are called with Python's lock. 0, what ems_line_load and the others return, or kNotPlain.
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

// The same of blocks that were planned before; these are called without Python's lock.
int ems_call_load_plan(EmsCalls* calls, const EmsPlan* plan, const EmsHow* how) {
    return static_cast<Calls*>(calls)->begin_call(*how).run_load(*plan, *how);
}

int ems_call_save_plan(EmsCalls* calls, const EmsPlan* plan, const EmsHow* how) {
    return static_cast<Calls*>(calls)->begin_call(*how).run_save(*plan, *how);
}

}  // extern "C"
