// One session's requests, answered from the pool without Python: saves, loads, exists, and what values ask. What needs
// the node (other nodes, limits, staging areas, whatever is malformed) is handed to Python, frame by frame, in order.
#pragma once

#include <map>
#include <utility>

#include "batch.hpp"
#include "stream.hpp"

namespace pool {

// Python functions for a session, called with the interpreter lock; none of them raises.
struct Callbacks {
    void (*look)();       // writes the budget's part of the Glance anew
    int (*grow)();        // takes more memory, if the tenant may have it, and looks; whether it did
    int (*refuse)(const Key* key, uint32_t slot);  // counts a block that found no room; its status
    void (*close_left)();                          // closes unused segments
};

// What a session may answer here. Versions are numbers of changes, which Python counts.
struct Terms {
    int64_t can_save;    // the tenant's rate has no limit, and blocks have their home here
    int64_t has_others;  // other nodes may have missing blocks
    const std::atomic<uint64_t>* budget_version;
    const std::atomic<uint64_t>* keyring_version;
    const std::atomic<int64_t>* board;  // where the client writes which leases it has read, or null
};

// What a session's client is reading: blocks that are pinned until it ends their lease, by a message, or by writing its
// number on the session's board, memory that both see: that wakes nobody, and is found whenever the session looks. Leases
// are read in order, so a number stands for all up to it.
class Leases {
  public:
    // board: null = there is none.
    explicit Leases(const std::atomic<int64_t>* board) : board_(board) {}

    bool is_full() const { return pinned_.size() >= kMost; }

    // Whether there may be something to find on the board.
    bool are_shown() const { return board_ != nullptr && !pinned_.empty(); }

    // A new lease of these blocks.
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

    // The same for the first lease that the board marks as read.
    std::vector<Id> end_read() {
        const bool is_read = are_shown() && pinned_.begin()->first <= board_->load(std::memory_order_acquire);
        return is_read ? take(pinned_.begin()) : std::vector<Id>{};
    }

    // Likewise any.
    std::vector<Id> end_one() { return !pinned_.empty() ? take(pinned_.begin()) : std::vector<Id>{}; }

  private:
    static constexpr size_t kMost = 1024;
    using Pinned = std::map<int64_t, std::vector<Id>>;  // none without blocks

    std::vector<Id> take(Pinned::iterator at) {
        std::vector<Id> ids = std::move(at->second);
        pinned_.erase(at);
        return ids;
    }

    const std::atomic<int64_t>* board_;
    Pinned pinned_;
    int64_t next_ = 1;  // odd: the even ones are Python's
};

class Serving {
  public:
    Serving(PoolHandle* handle, int fd, const Xxh3& xxh3, const Callbacks& callbacks, const Terms& terms)
        : handle_(handle), fd_(fd), xxh3_(xxh3), callbacks_(callbacks), terms_(terms), stream_(fd), leases_(terms.board) {}
    ~Serving();

    // Answers requests until one is Python's, or the connection fails: 0 and the frame, or an error number.
    // valid_at: the keyring's version when the session's key was last found valid.
    int next(uint64_t valid_at, ems::Frame& frame);

    bool has_frame() const;
    void feed(const uint8_t* data, size_t size) { stream_.feed(data, size); }
    void use_arena(const uint8_t* arena, int64_t size) { arena_ = arena, arena_bytes_ = size; }

  private:
    static constexpr int64_t kFirstLookNs = 1000000;  // at the board, after a request; the next looks come later and
    static constexpr int64_t kLastLookNs = 64 * kFirstLookNs;  // later, and then this far apart

    // The next request. Until it comes leases end that the client has read.
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

    // Whether there was a lease to end.
    bool end_read() {
        bool has_ended = false;
        for (std::vector<Id> ids; !(ids = leases_.end_read()).empty(); has_ended = true) {
            unpin(ids);
        }
        return has_ended;
    }

    bool answer(const ems::Frame& frame);
    bool save(const ems::Frame& frame);
    bool load(const ems::Frame& frame);
    bool pick(const ems::Frame& frame);
    bool exists(const ems::Frame& frame);
    bool has(const ems::Frame& frame);
    bool release(const ems::Frame& frame);
    void say_found(const ems::Frame& request, const std::vector<Id>& ids, uint8_t cause);
    void store(Save& part);
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
    bool asks_others(bool is_local) const { return terms_.has_others != 0 && !is_local; }

    PoolHandle* handle_;
    int fd_;
    const Xxh3& xxh3_;
    Callbacks callbacks_;
    Terms terms_;
    ems::FrameStream stream_;
    ems::FrameWriter out_;  // answers that were not sent yet
    bool is_held_ = false;    // the last answer waits for the next
    int64_t held_bytes_ = 0;  // bytes of the staging area that are saved, but not answered yet
    const uint8_t* arena_ = nullptr;
    int64_t arena_bytes_ = 0;
    std::vector<Id> batch_;  // pinned until `rest`: a batch makes room neither for itself nor for the next
    bool is_in_batch_ = false;  // its next message is on its way: nothing is done that can wait
    bool has_ended_ = false;
    int64_t num_stored_ = 0;     // of the batch
    uint32_t largest_slot_ = 0;  // of the batch
    Leases leases_;
};

}  // namespace pool
