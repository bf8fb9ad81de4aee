// The SDK's calls over a link: one function per call, from the names of its blocks to their results. It sends the same
// messages as the Python implementation, in the same order. An unexpected answer is passed to Python, which reports it.
#include <numeric>

#include "direct.hpp"

namespace {

using ems::Exchange;
using ems::kOutside;
using ems::kUnmapped;
using ems::Sum;

using ems::aligned;
using ems::kGroupBlocks;

// A load in progress: asks for the blocks, then verifies each block in the mapped pool memory and copies it. If every
// block is loaded that exists (EmsLoad::found), blocks are numbered among the existing ones.
class Loading {
  public:
    Loading(Exchange& line, EmsLoad& load) : line_(line), load_(load), blocks_(load.plan->blocks) {
        blocks_.edges += load.first * blocks_.num_groups;
        sizes_ = load.plan->sizes + load.first;
    }

    int run() {
        if (load_.is_asked == 0) {
            const int64_t num_given_back = load_.num_given_back;
            if (const int problem = ask()) {
                return problem;
            }
            load_.is_asked = 1;
            if (load_.num_given_back != num_given_back) {
                return kUnmapped;
            }
        }
        std::vector<const uint8_t*> sources(static_cast<size_t>(load_.num_found));
        for (int64_t i = 0; i < load_.num_found; i++) {
            last_ = ems::find(load_.mapped, load_.num_mapped, line_.found.segments[i], last_);
            if (last_ == nullptr) {
                return kUnmapped;
            }
            if (!ems::is_within(*last_, line_.found.offsets[i], line_.found.lengths[i])) {
                return kOutside;
            }
            sources[i] = last_->memory + line_.found.offsets[i];
        }
        if (const int problem = copy(sources)) {
            return problem;
        }
        return load_.lease != 0 ? release() : 0;
    }

  private:
    // looks to wait for the other thread's checksum of a block: a constant and one per so many bytes, about what it
    // takes
    static constexpr int64_t kLooks = 1000, kBytesALook = 8;
    static constexpr int64_t kReleaseNs = 100'000'000;  // time to release the lease even if the deadline has passed

    int ask() {
        const ems::Bytes keys{load_.plan->keys + load_.first * ems::kKeyBytes, load_.num * ems::kKeyBytes};
        const bool is_local = load_.is_local != 0;
        const int problem = load_.found != nullptr ? line_.call(ems::Pick{keys, is_local}, line_.found)
                                                   : line_.call(ems::Load{keys, is_local}, line_.found);
        return problem == 0 && !keep() ? line_.unexpected() : problem;
    }

    // Keeps the answer; false = it does not fit the request.
    bool keep() {
        const ems::Found& found = line_.found;
        load_.lease = found.lease;
        load_.cause = found.cause;
        load_.num_given_back = found.num_given_back;
        const size_t num = found.segments.size(), most = static_cast<size_t>(load_.num);
        const bool is_whole =
            found.offsets.size() == num && found.lengths.size() == num && found.sums.size == num * sizeof(Sum);
        if (!is_whole || num > most || (load_.found != nullptr && num != most)) {
            return false;
        }
        line_.sums.resize(num);
        if (num > 0) {
            std::memcpy(line_.sums.data(), found.sums.data, found.sums.size);
        }
        load_.num_found = load_.found != nullptr ? keep_found() : static_cast<int64_t>(num);
        load_.segments = found.segments.data();
        return true;
    }

    // Keeps only the answers for existing blocks; returns their number.
    int64_t keep_found() {
        std::vector<int64_t>& numbers = line_.numbers;
        numbers.clear();
        for (int64_t i = 0; i < load_.num; i++) {
            if (line_.found.lengths[i] == 0) {
                load_.found[i] = kMissing;
                continue;
            }
            const size_t to = numbers.size();
            numbers.push_back(i);
            line_.found.segments[to] = line_.found.segments[i];
            line_.found.offsets[to] = line_.found.offsets[i];
            line_.found.lengths[to] = line_.found.lengths[i];
            line_.sums[to] = line_.sums[i];
        }
        return static_cast<int64_t>(numbers.size());
    }

    // The index in the request of the i-th existing block.
    int64_t number(int64_t i) const { return load_.found != nullptr ? line_.numbers[i] : i; }

    // State of a block while it is loaded.
    enum Mark : uint8_t { kUnknown, kGood, kDamaged, kCopied };

    int copy(const std::vector<const uint8_t*>& sources) {
        std::vector<std::atomic<uint8_t>> marks(sources.size());
        std::atomic<int64_t> num_good{0};  // number of blocks before the first that is not known to be good
        std::atomic<bool> is_late{false};
        const auto ends = line_.found.lengths.begin() + load_.num_found;
        const int64_t bytes = std::accumulate(line_.found.lengths.begin(), ends, int64_t{0});
        const bool is_each = load_.found != nullptr;
        ems::Second::share(load_.num_found, bytes, [&](int64_t i) {
            is_late = is_late || ems::now_ns() > line_.deadline_ns;
            if (is_late) {
                return false;
            }
            if (!verify(sources, marks, i) || (!is_each && !are_good(sources, marks, num_good, i))) {
                return is_each;
            }
            ems::scatter(blocks_, number(i), sources[i], i + 1 < load_.num_found ? sources[i + 1] : nullptr);
            marks[i] = kCopied;
            return true;
        });
        if (is_each) {
            say_found(marks);
        }
        const auto first = std::find_if(marks.begin(), marks.end(), [](uint8_t mark) { return mark != kCopied; });
        load_.num_done = first - marks.begin();
        const auto damaged = is_each ? std::find(marks.begin(), marks.end(), kDamaged) : first;
        load_.corrupt = damaged != marks.end() && *damaged == kDamaged ? damaged - marks.begin() : -1;
        return is_late ? ETIMEDOUT : 0;
    }

    void say_found(const std::vector<std::atomic<uint8_t>>& marks) {
        for (size_t i = 0; i < marks.size(); i++) {
            if (marks[i] != kUnknown) {
                load_.found[line_.numbers[i]] = marks[i] == kCopied ? kLoaded : kMissing;
            }
        }
    }

    bool verify(const std::vector<const uint8_t*>& sources, std::vector<std::atomic<uint8_t>>& marks, int64_t i) const {
        const auto size = static_cast<size_t>(sizes_[number(i)]);
        const bool is_good =
            line_.found.lengths[i] == sizes_[number(i)] && ems::sum_of(*load_.xxh3, sources[i], size) == line_.sums[i];
        uint8_t unknown = kUnknown;
        marks[i].compare_exchange_strong(unknown, is_good ? kGood : kDamaged);
        return is_good;
    }

    // Whether all blocks before `end` are good; so no block is copied after a corrupt one. Waits for the other thread
    // while it computes a checksum, or computes it here if that takes long.
    bool are_good(const std::vector<const uint8_t*>& sources, std::vector<std::atomic<uint8_t>>& marks,
                  std::atomic<int64_t>& num_good, int64_t end) const {
        for (int64_t i = num_good, num_looks = 0; i < end; num_looks++) {
            if (marks[i] == kUnknown && num_looks > kLooks + sizes_[i] / kBytesALook) {
                verify(sources, marks, i);
            }
            const uint8_t mark = marks[i];  // read once: the other thread may change it between the two comparisons
            if (mark == kDamaged) {
                return false;
            }
            if (mark != kUnknown) {
                i++;
                num_looks = 0;
            }
        }
        for (int64_t before = num_good; before < end && !num_good.compare_exchange_weak(before, end);) {
        }
        return true;
    }

    int release() {
        const bool is_told_there = line_.board != nullptr && load_.lease % 2 != 0 && load_.corrupt < 0;
        if (is_told_there) {
            line_.board->store(load_.lease, std::memory_order_release);
            return 0;
        }
        const int64_t deadline_ns = line_.deadline_ns;
        line_.deadline_ns = std::max(deadline_ns, ems::now_ns() + kReleaseNs);
        const int problem = line_.send(ems::Release{load_.lease, load_.corrupt});
        line_.deadline_ns = deadline_ns;
        return problem;
    }

    Exchange& line_;
    EmsLoad& load_;
    ems::Batch blocks_;
    const int64_t* sizes_;
    const EmsSegment* last_ = nullptr;
};

// A save in progress: groups of blocks are staged in the arena's regions in turn.
class Saving {
  public:
    Saving(Exchange& line, EmsSave& save) : save_(save), line_(line), sizes_(save.plan->sizes) {}

    int run() {
        const uint8_t* parent = save_.parent;
        int64_t start = 0, limit = save_.first_bytes;
        bool is_ended = false;
        for (int64_t turn = 0; start < save_.num; turn++) {
            if (num_waiting_ == save_.num_regions) {
                if (const int problem = collect()) {
                    return problem;
                }
                if (save_.problem >= 0) {
                    break;
                }
            }
            const int64_t end = group_end(start, std::min(limit, save_.region_bytes));
            limit *= kGrowth;
            is_ended = end == save_.num;
            if (const int problem = put(start, end, turn % save_.num_regions, parent, is_ended)) {
                return problem;
            }
            parent = save_.is_chain != 0 ? save_.plan->keys + (end - 1) * ems::kKeyBytes : nullptr;
            start = end;
        }
        if (!is_ended) {
            if (const int problem = put(start, start, 0, nullptr, true)) {
                return problem;
            }
        }
        while (num_waiting_ > 0) {
            if (const int problem = collect()) {
                return problem;
            }
        }
        return 0;
    }

  private:
    static constexpr int64_t kGrowth = 2;

    // The end of the group that begins at block `start`: at most kGroupBlocks blocks, and at most `most` bytes unless
    // it is a single block.
    int64_t group_end(int64_t start, int64_t most) const {
        int64_t end = start, bytes = 0;
        while (end < save_.num && end - start < kGroupBlocks) {
            bytes += aligned(sizes_[end]);
            if (end > start && bytes > most) {
                break;
            }
            end++;
        }
        return end;
    }

    int put(int64_t start, int64_t end, int64_t region, const uint8_t* parent, bool is_last) {
        request_.offsets.clear();
        ems::Batch blocks = save_.plan->blocks;
        blocks.edges += start * blocks.num_groups;
        int64_t offset = region * save_.region_bytes;
        for (int64_t i = 0; i < end - start; i++) {
            request_.offsets.push_back(offset);
            ems::gather(blocks, i, save_.arena + offset);
            offset += aligned(sizes_[start + i]);
        }
        request_.keys = {save_.plan->keys + start * ems::kKeyBytes, (end - start) * ems::kKeyBytes};
        request_.lengths.assign(sizes_ + start, sizes_ + end);
        request_.parent = {parent, parent != nullptr ? ems::kKeyBytes : 0};
        request_.write_rcache = save_.write_rcache != 0;
        request_.is_last = is_last;
        request_.is_chain = save_.is_chain != 0;
        num_waiting_++;
        return line_.send(request_);
    }

    int collect() {
        ems::Saved saved;
        if (const int problem = line_.receive(saved)) {
            return problem;
        }
        num_waiting_--;
        const auto [statuses, num] = saved.statuses;
        if (num > static_cast<size_t>(save_.num - save_.num_done) || !ems::are_known(statuses, num)) {
            return line_.unexpected();
        }
        for (size_t i = 0; i < num; i++) {
            ems::count(save_, statuses[i]);
        }
        return 0;
    }

    EmsSave& save_;
    Exchange& line_;
    ems::Save request_;
    const int64_t* sizes_;
    int64_t num_waiting_ = 0;
};

}  // namespace

extern "C" {

// Opens a link over a connected socket, which the caller keeps owning. One thread may use the link at a time; the
// caller must close it.
EmsLine* ems_line_open(int fd) { return new Exchange(fd); }

void ems_line_close(EmsLine* line) { delete static_cast<Exchange*>(line); }

// *count = the length of the prefix of the keys that a load would find. Returns 0, an errno or kUnexpected.
int ems_line_exists(EmsLine* line, const uint8_t* keys, int64_t num, int is_local, int64_t* count) {
    Exchange& exchange = *static_cast<Exchange*>(line);
    *count = 0;
    for (int64_t start = 0, part; start < num; start += part) {
        part = std::min(num - start, ems::kMaxKeys);
        ems::Count answer;
        const ems::Bytes asked{keys + start * ems::kKeyBytes, static_cast<size_t>(part) * ems::kKeyBytes};
        if (const int problem = exchange.call(ems::Exists{asked, is_local != 0}, answer)) {
            return problem;
        }
        const int64_t found = answer.count;
        if (found < 0 || found > part) {
            return exchange.unexpected();
        }
        *count += found;
        if (found < part) {
            break;
        }
    }
    return 0;
}

// Loads the longest prefix of the blocks that the pool has, or each of them (EmsLoad::found), up to the first corrupt
// one; later blocks are not written. Returns 0, an errno, kUnexpected, kUnmapped or kOutside.
int ems_line_load(EmsLine* line, EmsLoad* load) { return Loading(*static_cast<Exchange*>(line), *load).run(); }

// Saves the blocks in order, up to the first that the pool does not accept. Returns 0, an errno or kUnexpected; without a
// staging area also kUnmapped or kOutside.
int ems_line_save(EmsLine* line, EmsSave* save) {
    Exchange& exchange = *static_cast<Exchange*>(line);
    return save->arena != nullptr ? Saving(exchange, *save).run() : ems::DirectSaving(exchange, *save).run();
}

}  // extern "C"
