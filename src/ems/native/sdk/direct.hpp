// A save whose blocks the client writes into the pool's memory: the agent reserves memory, the client copies and sums, and
// the agent publishes. Each byte is copied once. Only for agents that trust their one tenant (kvloom pool agent --direct).
#pragma once

#include <numeric>

#include "line.hpp"
#include "second.hpp"

namespace ems {

class DirectSaving {
  public:
    DirectSaving(Exchange& line, EmsSave& save) : line_(line), save_(save) {}

    // Continues after kUnmapped when it is called again.
    int run() {
        while (save_.num_done < save_.num && save_.problem < 0) {
            if (const int problem = save_group()) {
                return problem;
            }
        }
        return 0;
    }

  private:
    int save_group() {
        if (save_.is_asked == 0) {
            const int64_t num_given_back = save_.num_given_back;
            if (const int problem = reserve()) {
                return problem;
            }
            save_.is_asked = 1;
            if (save_.num_given_back != num_given_back) {
                return kUnmapped;
            }
        }
        const size_t num = line_.numbers.size();
        std::vector<uint8_t*> targets(num);
        const EmsSegment* last = nullptr;
        for (size_t i = 0; i < num; i++) {
            last = find(save_.mapped, save_.num_mapped, line_.reserved.segments[i], last);
            if (last == nullptr) {
                return kUnmapped;
            }
            if (!is_within(*last, line_.reserved.offsets[i], size_of(i))) {
                return kOutside;
            }
            targets[i] = const_cast<uint8_t*>(last->memory) + line_.reserved.offsets[i];
        }
        if (!write(targets)) {
            return ETIMEDOUT;
        }
        return commit();
    }

    // Asks for memory for the next blocks. What was answered about them stays in the link: the statuses; and numbers,
    // segments and offsets of those that have memory.
    int reserve() {
        const int64_t start = save_.num_done, num = std::min(save_.num - start, kMaxKeys);
        const uint8_t* before = start > 0 ? save_.plan->keys + (start - 1) * kKeyBytes : save_.parent;
        const int64_t* sizes = save_.plan->sizes + start;
        const Reserve request{{save_.plan->keys + start * kKeyBytes, num * kKeyBytes},
                              {sizes, sizes + num},
                              {before, before != nullptr ? kKeyBytes : 0}};
        const int problem = line_.call(request, line_.reserved);
        return problem == 0 && !keep(static_cast<size_t>(num)) ? line_.unexpected() : problem;
    }

    // Keeps the answer; false = it does not fit the request.
    bool keep(size_t num) {
        Reserved& reserved = line_.reserved;
        const auto [statuses, num_statuses] = reserved.statuses;
        save_.num_given_back = reserved.num_given_back;
        if (num_statuses != num || reserved.segments.size() != num || reserved.offsets.size() != num ||
            !are_known(statuses, num)) {
            return false;
        }
        line_.statuses.assign(statuses, statuses + num);
        line_.numbers.clear();
        for (size_t i = 0; i < num; i++) {
            if (statuses[i] == kStored) {
                const size_t to = line_.numbers.size();
                line_.numbers.push_back(static_cast<int64_t>(i));
                reserved.segments[to] = reserved.segments[i];
                reserved.offsets[to] = reserved.offsets[i];
            }
        }
        save_.segments = reserved.segments.data();
        save_.num_found = static_cast<int64_t>(line_.numbers.size());
        return true;
    }

    // The number in the plan, and the bytes, of the i-th block that has memory.
    int64_t number(size_t i) const { return save_.num_done + line_.numbers[i]; }
    int64_t size_of(size_t i) const { return save_.plan->sizes[number(i)]; }

    // Copies and sums the blocks that have memory; false = the deadline has passed.
    bool write(const std::vector<uint8_t*>& targets) {
        const size_t num = targets.size();
        line_.sums.resize(num);
        int64_t bytes = 0;
        for (size_t i = 0; i < num; i++) {
            bytes += size_of(i);
        }
        std::atomic<bool> is_late{false};
        Second::share(static_cast<int64_t>(num), bytes, [&](int64_t i) {
            is_late = is_late || now_ns() > line_.deadline_ns;
            if (!is_late) {
                line_.sums[i] = gather_summed(save_.plan->blocks, number(i), targets[i], *save_.xxh3);
            }
            return !is_late;
        });
        return !is_late;
    }

    int commit() {
        Saved saved;
        if (const int problem = line_.call(Commit{{line_.sums.data(), line_.sums.size() * sizeof(Sum)}}, saved)) {
            return problem;
        }
        const auto [statuses, num] = saved.statuses;
        if (num != line_.numbers.size() || !are_known(statuses, num)) {
            return line_.unexpected();
        }
        for (size_t i = 0; i < num; i++) {
            line_.statuses[line_.numbers[i]] = statuses[i];
        }
        for (const uint8_t status : line_.statuses) {
            count(save_, status);
        }
        save_.is_asked = 0;
        return 0;
    }

    Exchange& line_;
    EmsSave& save_;
};

}  // namespace ems
