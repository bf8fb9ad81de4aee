// One session's requests, answered from the pool without Python: saves, loads, exists, and what values ask. What needs
// the node (other nodes, limits, staging areas, whatever is malformed) is handed to Python, frame by frame, in order.
#pragma once

#include <map>

#include "batch.hpp"
#include "stream.hpp"

namespace pool {

// What Python does for a session, with its lock; none of them raises.
struct Callbacks {
    void (*look)();       // writes the budget's part of the Glance anew
    int (*grow)();        // takes more memory, if the tenant may have it, and looks; whether it did
    int (*refuse)(const Key* key, uint32_t slot);  // counts a block that found no room; its status
    void (*close_left)();                          // closes unused segments
};

// What a session may answer here. Versions are numbers of changes, which Python counts.
struct Terms {
    int64_t can_save;    // the tenant's rate has no limit, and blocks have their home here
    int64_t has_others;  // other nodes may have what is not here
    const std::atomic<uint64_t>* budget_version;
    const std::atomic<uint64_t>* keyring_version;
};

class Serving {
  public:
    Serving(PoolHandle* handle, int fd, const Xxh3& xxh3, const Callbacks& callbacks, const Terms& terms)
        : handle_(handle), fd_(fd), xxh3_(xxh3), callbacks_(callbacks), terms_(terms), stream_(fd) {}
    ~Serving();

    // Answers requests until one is Python's, or the connection fails: 0 and the frame, or an error number.
    // valid_at: the keyring's version when the session's key was last found valid.
    int next(uint64_t valid_at, ems::Frame& frame);

    bool has_frame() const;
    void feed(const uint8_t* data, size_t size) { stream_.feed(data, size); }
    void use_arena(const uint8_t* arena, int64_t size) { arena_ = arena, arena_bytes_ = size; }

  private:
    using Handler = bool (Serving::*)(const ems::Frame&);

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
    int64_t held_bytes_ = 0;  // of the staging area, whose blocks are saved: its client does not know yet
    const uint8_t* arena_ = nullptr;
    int64_t arena_bytes_ = 0;
    std::vector<Id> batch_;  // pinned until `rest`: a batch makes room neither for itself nor for the next
    bool has_ended_ = false;
    int64_t num_stored_ = 0;     // of the batch
    uint32_t largest_slot_ = 0;  // of the batch
    std::map<int64_t, std::vector<Id>> leases_;
    int64_t next_lease_ = 1;  // odd: the even ones are Python's
};

}  // namespace pool
