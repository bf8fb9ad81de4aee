// Serves one session's requests from the pool without Python: save, load, exists; reserve and commit for clients that
// write into the pool themselves; pick and has for values. Saves ask Python for the homes of blocks and the tenant's
// rate. Requests for blocks that other nodes may have, for memory, and malformed ones are passed to Python, frame by
// frame, in order: `answer` decides that.
#pragma once

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "batch.hpp"
#include "stream.hpp"

namespace pool {

constexpr int kUnchecked = -1;  // instead of an errno: the session's key must be checked before the frame is answered
constexpr int64_t kKeysAtOnce = 64;  // keys handled per hold of the lock, so that other sessions get turns

// The keys in the bytes of a message; Python refuses bytes that are not keys, or too many.
struct Keys {
    const Key* at;
    int64_t num;
    bool are_good;

    explicit Keys(const ems::Bytes& packed)
        : at(reinterpret_cast<const Key*>(packed.data)), num(static_cast<int64_t>(packed.size / sizeof(Key))),
          are_good(packed.size % sizeof(Key) == 0 && num <= ems::kMaxKeys) {}

    bool have(const std::vector<int64_t>& values) const { return static_cast<int64_t>(values.size()) == num; }
};

// The key before a batch's first one, or null; Python refuses other bytes.
inline bool is_parent(const ems::Bytes& packed) { return packed.size == 0 || packed.size == sizeof(Key); }
inline const Key* parent_in(const ems::Bytes& packed) {
    return packed.size > 0 ? reinterpret_cast<const Key*>(packed.data) : nullptr;
}

inline bool is_block(int64_t length) { return length > 0 && length <= ems::kMaxBlockBytes; }

// Whether all blocks are in the staging area.
inline bool is_within(const ems::Save& wanted, int64_t arena_bytes) {
    const std::vector<int64_t>&offsets = wanted.offsets, &lengths = wanted.lengths;
    for (size_t i = 0; i < lengths.size(); i++) {
        if (!is_block(lengths[i]) || offsets[i] < 0 || offsets[i] > arena_bytes - lengths[i]) {
            return false;
        }
    }
    return true;
}

// Whether the next request has arrived and is the last save of a batch: its client then waits for all answers.
inline bool ends_batch(const ems::FrameStream& stream) {
    ems::Frame next{};
    ems::Save wanted;
    return stream.peek(next) && next.read(wanted) && wanted.is_last;
}

// Python functions that a session calls; they take the interpreter lock and do not raise.
struct Callbacks {
    void (*look)();       // updates the budget's part of the Glance
    int (*grow)();        // adds memory if the tenant's budget allows it, then as look; returns whether it did
    int (*refuse)(const Key* key, uint32_t slot);  // counts a block without room; returns its status
    void (*close_left)();                          // closes given-back segments
};

// The home of a new block: this node; another one; another one that is unreachable for now, so the block stays here.
enum Route : uint8_t { kHere = 0, kAway = 1, kCutOff = 2 };

// What saves ask of the node: Python functions, as Callbacks; null where nothing is to be asked.
struct Node {
    int (*may_put)(int64_t num_bytes);  // whether the tenant's rate allows so many bytes now; counts a refusal
    void (*route)(const Key* keys, int64_t num, uint8_t* routes);  // null = there are no other nodes
    // Sends a block home. Returns whether it arrived before the deadline. parent: null = none.
    int (*send_now)(const Key* key, const uint8_t* bytes, int64_t length, const Key* parent, int64_t deadline_ns);
    // Sends blocks home in the background, and takes over one pin of each. Returns by are_sent which will be sent;
    // waits until the deadline for its turn.
    void (*send_later)(const Id* ids, const Key* const* parents, int64_t num, int64_t deadline_ns, uint8_t* are_sent);
};

// How a session is served. Versions are counters of changes, which Python increments.
struct Terms {
    Node node;
    double copies_share;  // share of the quota for copies of other nodes' blocks
    const std::atomic<uint64_t>* budget_version;
    const std::atomic<uint64_t>* keyring_version;
    int64_t is_direct;  // the client may write into memory that is reserved for it
    const std::atomic<int64_t>* board;  // shared memory in which the client marks leases as read; null = none
};

// The leases of a session: pinned blocks that the client is reading. The client ends a lease by a message, or by
// writing its number to the board, memory shared with the session; this wakes no thread, and the session finds it when
// it next looks. Clients read leases in order, so a number on the board ends all leases up to it.
class Leases {
  public:
    // board: null = none.
    explicit Leases(const std::atomic<int64_t>* board) : board_(board) {}

    bool is_full() const { return pinned_.size() >= kMost; }

    // Whether the board may show leases that have ended.
    bool are_shown() const { return board_ != nullptr && !pinned_.empty(); }

    // Creates a lease of these pinned blocks; returns its number.
    int64_t lend(std::vector<Id> ids) {
        const int64_t number = next_;
        next_ += 2;
        pinned_.emplace(number, std::move(ids));
        return number;
    }

    // Ends a lease. Returns its blocks, whose pins the caller owns; none if there is no such lease.
    std::vector<Id> end(int64_t number) {
        const auto found = pinned_.find(number);
        return found != pinned_.end() ? take(found) : std::vector<Id>{};
    }

    // Ends the first lease if the board marks it as read. Returns its blocks, as end().
    std::vector<Id> end_read() {
        const bool is_read = are_shown() && pinned_.begin()->first <= board_->load(std::memory_order_acquire);
        return is_read ? take(pinned_.begin()) : std::vector<Id>{};
    }

    // Ends some lease. Returns its blocks, as end(); none if there is no lease.
    std::vector<Id> end_one() { return !pinned_.empty() ? take(pinned_.begin()) : std::vector<Id>{}; }

  private:
    static constexpr size_t kMost = 1024;
    using Pinned = std::map<int64_t, std::vector<Id>>;  // every lease has at least one block

    std::vector<Id> take(Pinned::iterator at) {
        std::vector<Id> ids = std::move(at->second);
        pinned_.erase(at);
        return ids;
    }

    const std::atomic<int64_t>* board_;
    Pinned pinned_;
    int64_t next_ = 1;  // odd numbers; Python uses the even ones
};

class Serving {
  public:
    Serving(PoolHandle* handle, int fd, const Xxh3& xxh3, const Callbacks& callbacks, const Terms& terms)
        : handle_(handle), fd_(fd), xxh3_(xxh3), callbacks_(callbacks), terms_(terms), stream_(fd), leases_(terms.board) {}
    ~Serving();

    // Answers requests until one must be handled by Python, or the connection fails. Returns 0 and the frame, or an
    // errno; or kUnchecked and the frame, which the next call answers. valid_at: the keyring's version when the session's
    // key was last checked and valid.
    int next(uint64_t valid_at, ems::Frame& frame);

    bool has_frame() const;
    void feed(const uint8_t* data, size_t size) { stream_.feed(data, size); }
    void use_arena(const uint8_t* arena, int64_t size) { arena_ = arena, arena_bytes_ = size; }

  private:
    // Pauses between looks at the board while no request arrives: kFirstLookNs at first, then doubling up to
    // kLastLookNs.
    static constexpr int64_t kFirstLookNs = 1000000;
    static constexpr int64_t kLastLookNs = 64 * kFirstLookNs;

    // Waits for the next request, and meanwhile ends leases that the client has read.
    int receive(ems::Frame& frame) {
        for (int64_t pause_ns = kFirstLookNs;; pause_ns = std::min(2 * pause_ns, kLastLookNs)) {
            const bool looks = leases_.are_shown();
            const int problem = stream_.next(looks ? ems::now_ns() + pause_ns : ems::kForEver, frame);
            if (!looks || problem != ETIMEDOUT) {
                return problem;
            }
            end_read();
        }
    }

    // Ends the leases that the client has read; returns whether there were any.
    bool end_read() {
        bool has_ended = false;
        for (std::vector<Id> ids; !(ids = leases_.end_read()).empty(); has_ended = true) {
            unpin(ids);
        }
        return has_ended;
    }

    // Handles a request; false = it is left to Python, as are malformed ones. One `answer` for each request whose row
    // says that C++ answers it.
    bool answer(const ems::Frame& frame);
#define DECLARE_ANSWER(Request) bool answer(const ems::Frame& frame, const ems::Request& request);
    EMS_NATIVE_REQUESTS(DECLARE_ANSWER)
#undef DECLARE_ANSWER

    template <typename Answer>
    void say(const ems::Frame& request, const Answer& answer) {
        out_.add(answer, request.header.request_id);
    }
    void say_found(const ems::Frame& request, const std::vector<Id>& ids, uint8_t cause);
    void drop_reserved();
    int64_t save_some(const ems::Save& wanted, int64_t start, int64_t stop, uint8_t* statuses);
    void store(Save& part, const uint8_t* routes);
    void send_home(Save& part, const uint8_t* routes);
    bool release_sent();
    bool may_put(const int64_t* lengths, int64_t num) const {
        return terms_.node.may_put == nullptr ||
               terms_.node.may_put(std::accumulate(lengths, lengths + num, int64_t{0})) != 0;
    }
    template <typename Step>
    void with_memory(Save& part, Step step);
    void count_stored(int64_t length);
    int flush();
    bool rest();
    void end_batch();
    void unpin(const std::vector<Id>& ids);
    void distrust(Id id);

    void close_left() {
        if (handle_->glance.num_left > 0) {
            callbacks_.close_left();
        }
    }
    bool asks_others(bool is_local) const { return terms_.node.route != nullptr && !is_local; }

    PoolHandle* handle_;
    int fd_;
    const Xxh3& xxh3_;
    Callbacks callbacks_;
    Terms terms_;
    ems::FrameStream stream_;
    ems::Frame unchecked_{};
    bool is_unchecked_ = false;  // whether it was not answered yet
    ems::FrameWriter out_;  // answers that are not sent yet
    bool is_held_ = false;    // whether the last answer is held back to be sent with the next one
    int64_t held_bytes_ = 0;  // bytes of the staging area that are saved but whose answers are held back
    const uint8_t* arena_ = nullptr;
    int64_t arena_bytes_ = 0;
    std::vector<Id> batch_;  // the batch's blocks, pinned until rest() so that neither it nor the next one evicts them
    bool is_in_batch_ = false;  // the batch's next message is expected: work that can wait is not done
    bool has_ended_ = false;
    int64_t send_by_ns_ = 0;  // until when the batch may wait for other nodes; 0 = no batch has begun
    uint8_t last_status_ = kStored;  // status of the batch's last block that was tried; nothing follows a refused one
    // Memory that the client is writing to, and whose it is until its commit.
    struct Reserved {
        Key key;
        Key parent;
        bool has_parent;
        uint64_t offset;
        uint32_t length;
    };
    std::vector<Reserved> reserved_;
    bool has_reserved_ = false;  // a commit of `reserved_`, which may be empty, is expected
    int64_t num_stored_ = 0;     // of the batch
    uint32_t largest_slot_ = 0;  // of the batch
    Leases leases_;
};

// Repeats a step of a save with more memory, as long as it needs some and the tenant's budget allows it.
template <typename Step>
void Serving::with_memory(Save& part, Step step) {
    if (handle_->glance.looked_at != terms_.budget_version->load()) {
        callbacks_.look();
    }
    part.may_grow = handle_->glance.may_grow;
    part.copies_limit = static_cast<double>(handle_->glance.quota) * terms_.copies_share;
    while (step() == kNeedsMemory) {
        part.may_grow = callbacks_.grow();
    }
    close_left();
}

inline void Serving::count_stored(int64_t length) {
    num_stored_++;
    largest_slot_ = std::max(largest_slot_, slot_bytes(static_cast<uint32_t>(length)));
}

}  // namespace pool
