/*
 * One initialised engine: the socket to its host, its three threads, waiting calls and running requests.
 *
 *   writer   sends the messages that calls have queued; no other thread writes to the socket
 *   reader   receives messages, wakes waiting calls, queues responses; runs no code of the program
 *   deliver  runs the callbacks, one after another
 *
 * One lock guards every Link. It is not held while code of the program runs (destructors of callbacks included) or
 * during system calls that can block, except while a host is started, so that no fork can happen meanwhile.
 */
#ifndef KVLOOM_LINK_HPP
#define KVLOOM_LINK_HPP

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kvloom_engine/infer_request.h"
#include "process.hpp"
#include "wire.hpp"

namespace kvloom {

using infrastructure::Error;
using infrastructure::Status;
using llm::engine::Compare;
using llm::engine::RequestId;

/* Shared rather than copied, because copying a callback runs code of the program. */
using Callback = std::shared_ptr<const llm::engine::SendResponseCallback>;

extern std::mutex lock;
using Held = std::unique_lock<std::mutex>;

/* The host's answer to a call. */
struct Answer {
    Status status;
    std::vector<uint64_t> values;
};

class Link : public std::enable_shared_from_this<Link> {
public:
    enum class State { OPENING, OPEN, CLOSING };

    Link() = default;

    /* Starts the host and the threads. Lock held. */
    Status Start();

    /*
     * Exchanges hellos and loads the model, without a time limit. Lock held, but released while waiting, as in all
     * functions that wait.
     */
    Status Open(Held &held, const std::string &config_path, Callback callback);

    /* Sends a request, which is copied, and waits until the host has accepted it. Lock not held. */
    Status Forward(const llm::engine::InferenceRequestInner &inner, Callback callback, bool is_checked);
    Status Stop(Held &held, const RequestId &id);
    Answer Quotas(Held &held);

    /* Asks the host to end all running requests. Lock held. */
    Status Finish(Held &held);

    /*
     * Ends the host and the threads, after the last callback. If called from a callback, they end after it has
     * returned. Lock not held.
     */
    void Close();

    /* Lock held for all of these. */
    State CurrentState() const { return state_; }
    bool IsForked() const { return is_forked_; }
    bool IsCallbackThread() const { return std::this_thread::get_id() == deliver_.get_id(); }
    size_t NumRunning() const { return running_.size(); }
    uint64_t MaxBatch() const { return max_batch_; }
    const Callback &DefaultCallback() const { return callback_; }

private:
    using Clock = std::chrono::steady_clock;

    /* A call that waits for its answer. */
    struct Call {
        Answer answer;
        bool is_done = false;
        uint64_t request = 0;  /* the request that it starts, 0 = none */
    };

    /* A request between Forward and its last response. */
    struct Running {
        RequestId id;
        Callback callback;
        bool is_accepted = false;  /* the host has accepted it, or sent a response */
        bool has_end = false;      /* its last response is queued */
    };

    /* A response that is queued for the callback. */
    struct Event {
        uint64_t request;
        uint32_t flag;
        std::string error;
        std::vector<int64_t> ids;
    };

    static void BeforeFork();
    static void AfterFork();
    static void AfterForkInChild();

    Answer Ask(Held &held, uint32_t call, std::string message, uint64_t request = 0);
    void Tell(std::string message);
    Answer Lost() const;
    void Forget(uint64_t request);

    void StartThreads();
    void Write();
    void Read();
    void Deliver();
    void DeliverFirst(Held &held);
    std::string WhyItEnded(bool is_broken) const;
    void Lose(const std::string &why);
    void Release();

    bool Take(const std::string &message);
    bool TakeHello(Unpacker *fields);
    bool TakeAnswer(Unpacker *fields);
    bool TakeEvent(Unpacker *fields);

    State state_ = State::OPENING;
    bool is_forked_ = false;
    bool is_greeted_ = false;
    bool is_lost_ = false;    /* the host has ended: nothing more is sent or received */
    bool is_closed_ = false;  /* no more responses will be queued */
    bool is_released_by_deliver_ = false;
    std::string program_;
    std::string mismatch_;    /* why the host's hello was refused */
    std::string why_lost_;
    std::string callback_error_;  /* message of the first exception that a callback threw */
    HostProcess host_{-1, -1, -1};
    Clock::time_point heard_;     /* when the last message was received */
    std::map<uint32_t, Call *> calls_;
    std::map<uint64_t, std::shared_ptr<Running>> running_;
    std::map<RequestId, uint64_t, Compare> numbers_;
    std::deque<std::string> outgoing_;
    std::deque<Event> events_;
    std::condition_variable answered_, has_outgoing_, has_event_;
    uint64_t max_batch_ = 0;
    Callback callback_;  /* for requests without one of their own */
    std::thread writer_, reader_, deliver_;
};

}

#endif
