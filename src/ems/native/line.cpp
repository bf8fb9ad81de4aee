// The SDK's calls over a link: one function a call, from the names of its blocks to what became of them. They are the
// same messages as Python's, in the same order; an answer that is not the one expected is handed to Python, which says
// what it is.
#include "blocks.hpp"
#include "stream.hpp"

namespace {

using ems::Frame;
using ems::FrameStream;
using ems::FrameWriter;
using ems::Sum;

// Instead of an error number.
constexpr int kUnexpected = -1;  // the answer is in `odd`
constexpr int kUnmapped = -2;    // segments are to be mapped, or mapped anew, before the call goes on
constexpr int kOutside = -3;     // a block lies outside of its segment

constexpr int64_t kBytesAtOnce = 8 << 20;  // between two looks at the clock
constexpr int64_t kGroupBlocks = 64;  // of a message
constexpr int64_t kAlign = 64;
constexpr uint8_t kConflict = 2, kLocal = 6;  // of messages.py: what is up to the first, and the second, is a success

bool is_success(uint8_t status) { return status <= kConflict || status == kLocal; }

int64_t aligned(int64_t size) { return (size + kAlign - 1) / kAlign * kAlign; }

}  // namespace

extern "C" {

// A link for one call. odd: the frame that was not expected, until the thread's next call.
struct EmsLine {
    int64_t fd;
    int64_t deadline_ns;
    int64_t request_id;  // of the last request
    const uint8_t* odd;
    int64_t num_odd;
};

// A segment of the pool that is mapped here.
struct EmsSegment {
    int64_t number;
    const uint8_t* memory;
    int64_t bytes;
};

// Blocks to load. sizes [num] in bytes.
struct EmsLoad {
    const ems::Batch* blocks;
    const uint8_t* keys;
    const int64_t* sizes;
    int64_t num;
    int64_t is_local;
    const ems::Xxh3* xxh3;
    const EmsSegment* mapped;
    int64_t num_mapped;
    int64_t num_given_back;  // when they were mapped; what the answer says
    // The answer. segments, offsets, lengths, sums: [num], of which num_found are filled.
    int64_t* segments;
    int64_t* offsets;
    int64_t* lengths;
    Sum* sums;
    int64_t num_found;
    int64_t lease;
    int64_t cause;
    int64_t is_asked;  // the answer is here: the call goes on behind it
    int64_t num_done;  // blocks that were verified and written
    int64_t corrupt;   // the first that was damaged, or -1
};

// Blocks to save. sizes [num] in bytes; statuses [num], of which num_done are known.
struct EmsSave {
    const ems::Batch* blocks;
    const uint8_t* keys;
    const int64_t* sizes;
    const uint8_t* parent;  // the key before the first, or null
    uint8_t* arena;
    uint8_t* statuses;
    int64_t num;
    int64_t num_done;
    int64_t region_bytes;  // of the arena, for one message's blocks; a multiple of kAlign
    int64_t num_regions;
    int64_t first_bytes;  // of the first message, about; the next ones grow
    int64_t write_rcache;
};

}  // extern "C"

namespace {

// Requests and their answers, in order.
class Exchange {
  public:
    explicit Exchange(EmsLine& line) : line_(line), stream_(static_cast<int>(line.fd)) {}

    FrameWriter& begin(ems::Op op, uint8_t num_values) {
        writer_.data.clear();
        const auto id = static_cast<uint64_t>(++line_.request_id);
        writer_.begin(op, id, ems::left_ms(line_.deadline_ns), num_values);
        return writer_;
    }

    int send() {
        writer_.end();
        return ems::send_all(static_cast<int>(line_.fd), writer_.data.data(), writer_.data.size(), line_.deadline_ns);
    }

    // The next answer, which must be that message. 0, an error number, or kUnexpected.
    int receive(ems::Op op, Frame& frame) {
        const int problem = stream_.next(line_.deadline_ns, frame);
        const bool is_odd = problem == ems::kMalformed || (problem == 0 && frame.header.op != op);
        return is_odd ? unexpected(frame) : problem;
    }

    int unexpected(const Frame& frame) {
        static thread_local std::vector<uint8_t> kept;
        kept.assign(frame.bytes, frame.bytes + frame.size);
        line_.odd = kept.data();
        line_.num_odd = static_cast<int64_t>(kept.size());
        return kUnexpected;
    }

  private:
    EmsLine& line_;
    FrameStream stream_;
    FrameWriter writer_;
};

// A load under way: the answer, then each block where it lies, verified before it is copied.
class Loading {
  public:
    Loading(EmsLine& line, EmsLoad& load) : line_(line), load_(load) {}

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
            const EmsSegment* segment = find(load_.segments[i]);
            if (segment == nullptr) {
                return kUnmapped;
            }
            const int64_t offset = load_.offsets[i], length = load_.lengths[i];
            if (offset < 0 || length < 0 || length > segment->bytes || offset > segment->bytes - length) {
                return kOutside;
            }
            sources[i] = segment->memory + offset;
        }
        if (const int problem = copy(sources)) {
            return problem;
        }
        return load_.lease != 0 ? release() : 0;
    }

  private:
    static constexpr int64_t kReleaseNs = 100'000'000;  // a late load still says that it is over

    int ask() {
        Exchange exchange(line_);
        FrameWriter& request = exchange.begin(ems::kLoad, 2);
        request.bytes(load_.keys, load_.num * ems::kKeyBytes);
        request.boolean(load_.is_local != 0);
        Frame frame;
        int problem = exchange.send();
        problem = problem != 0 ? problem : exchange.receive(ems::kFound, frame);
        return problem == 0 && !read(frame) ? exchange.unexpected(frame) : problem;
    }

    bool read(const Frame& frame) {
        ems::BodyReader body = frame.body();
        std::vector<int64_t> segments, offsets, lengths;
        size_t num_sums;
        load_.lease = body.integer();
        body.integers(segments);
        body.integers(offsets);
        body.integers(lengths);
        const uint8_t* sums = body.bytes(num_sums);
        load_.cause = body.integer();
        load_.num_given_back = body.integer(0);
        const size_t num = segments.size();
        const bool is_whole = offsets.size() == num && lengths.size() == num && num_sums == num * sizeof(Sum);
        if (!body.is_good(1) || !is_whole || num > static_cast<size_t>(load_.num)) {
            return false;
        }
        std::copy(segments.begin(), segments.end(), load_.segments);
        std::copy(offsets.begin(), offsets.end(), load_.offsets);
        std::copy(lengths.begin(), lengths.end(), load_.lengths);
        if (num > 0) {
            std::memcpy(load_.sums, sums, num_sums);
        }
        load_.num_found = static_cast<int64_t>(num);
        return true;
    }

    const EmsSegment* find(int64_t number) {
        if (last_ == nullptr || last_->number != number) {
            const EmsSegment* end = load_.mapped + load_.num_mapped;
            const auto* found = std::find_if(load_.mapped, end, [&](const auto& one) { return one.number == number; });
            last_ = found != end ? found : nullptr;
        }
        return last_;
    }

    int copy(const std::vector<const uint8_t*>& sources) {
        int64_t left = 0;
        for (; load_.num_done < load_.num_found; load_.num_done++) {
            const int64_t i = load_.num_done;
            if (left <= 0) {
                if (ems::now_ns() > line_.deadline_ns) {
                    return ETIMEDOUT;
                }
                left = kBytesAtOnce;
            }
            if (load_.lengths[i] != load_.sizes[i] ||
                !ems::scatter(*load_.blocks, i, sources[i], load_.sizes[i], load_.xxh3, &load_.sums[i])) {
                load_.corrupt = i;
                return 0;
            }
            left -= load_.sizes[i];
        }
        return 0;
    }

    int release() {
        const int64_t deadline_ns = line_.deadline_ns;
        line_.deadline_ns = std::max(deadline_ns, ems::now_ns() + kReleaseNs);
        Exchange exchange(line_);
        FrameWriter& request = exchange.begin(ems::kRelease, 2);
        request.integer(load_.lease);
        request.integer(load_.corrupt);
        const int problem = exchange.send();
        line_.deadline_ns = deadline_ns;
        return problem;
    }

    EmsLine& line_;
    EmsLoad& load_;
    const EmsSegment* last_ = nullptr;
};

// A save under way: groups of blocks go through the arena's regions in turn.
class Saving {
  public:
    Saving(EmsLine& line, EmsSave& save) : save_(save), exchange_(line) {}

    int run() {
        const uint8_t* parent = save_.parent;
        int64_t start = 0, limit = save_.first_bytes;
        bool is_ended = false;
        for (int64_t turn = 0; start < save_.num; turn++) {
            if (num_waiting_ == save_.num_regions) {
                if (const int problem = collect()) {
                    return problem;
                }
                if (!is_whole_) {
                    break;
                }
            }
            const int64_t end = group_end(start, std::min(limit, save_.region_bytes));
            limit *= kGrowth;
            is_ended = end == save_.num;
            if (const int problem = put(start, end, turn % save_.num_regions, parent, is_ended)) {
                return problem;
            }
            parent = save_.keys + (end - 1) * ems::kKeyBytes;
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

    // Where the group ends that begins at a block: at most kGroupBlocks and, beyond the first, `most` bytes.
    int64_t group_end(int64_t start, int64_t most) const {
        int64_t end = start, bytes = 0;
        while (end < save_.num && end - start < kGroupBlocks) {
            bytes += aligned(save_.sizes[end]);
            if (end > start && bytes > most) {
                break;
            }
            end++;
        }
        return end;
    }

    int put(int64_t start, int64_t end, int64_t region, const uint8_t* parent, bool is_last) {
        std::array<int64_t, kGroupBlocks> offsets;
        ems::Batch blocks = *save_.blocks;
        blocks.edges += start * blocks.num_groups;
        int64_t offset = region * save_.region_bytes;
        for (int64_t i = 0; i < end - start; i++) {
            offsets[i] = offset;
            ems::gather(blocks, i, save_.arena + offset);
            offset += aligned(save_.sizes[start + i]);
        }
        FrameWriter& frame = exchange_.begin(ems::kSave, 7);
        frame.bytes(save_.keys + start * ems::kKeyBytes, (end - start) * ems::kKeyBytes);
        frame.integers(offsets.data(), end - start);
        frame.integers(save_.sizes + start, end - start);
        frame.bytes(parent, parent != nullptr ? ems::kKeyBytes : 0);
        frame.boolean(save_.write_rcache != 0);
        frame.boolean(is_last);
        frame.boolean(true);
        num_waiting_++;
        return exchange_.send();
    }

    int collect() {
        Frame frame;
        if (const int problem = exchange_.receive(ems::kSaved, frame)) {
            return problem;
        }
        num_waiting_--;
        ems::BodyReader body = frame.body();
        size_t num;
        const uint8_t* statuses = body.bytes(num);
        if (!body.is_good() || static_cast<int64_t>(num) > save_.num - save_.num_done) {
            return exchange_.unexpected(frame);
        }
        if (num > 0) {
            std::memcpy(save_.statuses + save_.num_done, statuses, num);
        }
        save_.num_done += static_cast<int64_t>(num);
        is_whole_ = is_whole_ && (num == 0 || std::all_of(statuses, statuses + num, is_success));
        return 0;
    }

    EmsSave& save_;
    Exchange exchange_;
    int64_t num_waiting_ = 0;
    bool is_whole_ = true;
};

}  // namespace

extern "C" {

// How many of the keys, from the first on, a load would find.
int ems_line_exists(EmsLine* line, const uint8_t* keys, int64_t num, int is_local, int64_t* count) {
    Exchange exchange(*line);
    *count = 0;
    for (int64_t start = 0, part; start < num; start += part) {
        part = std::min(num - start, ems::kMaxKeys);
        FrameWriter& request = exchange.begin(ems::kExists, 2);
        request.bytes(keys + start * ems::kKeyBytes, part * ems::kKeyBytes);
        request.boolean(is_local != 0);
        Frame frame;
        int problem = exchange.send();
        problem = problem != 0 ? problem : exchange.receive(ems::kCount, frame);
        if (problem != 0) {
            return problem;
        }
        ems::BodyReader body = frame.body();
        const int64_t found = body.integer();
        if (!body.is_good() || found < 0 || found > part) {
            return exchange.unexpected(frame);
        }
        *count += found;
        if (found < part) {
            break;
        }
    }
    return 0;
}

// Loads the longest prefix of the blocks that the pool has, up to the first that is damaged; the blocks behind it leave
// the cache as it was.
int ems_line_load(EmsLine* line, EmsLoad* load) { return Loading(*line, *load).run(); }

// Saves the blocks in order, up to the first that the pool does not take.
int ems_line_save(EmsLine* line, EmsSave* save) { return Saving(*line, *save).run(); }

}  // extern "C"
