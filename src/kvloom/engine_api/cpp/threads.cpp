/* The three threads of a Link. */
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <sys/socket.h>
#include <unistd.h>

#include "link.hpp"
#include "response.hpp"

namespace kvloom {

using llm::engine::InferenceResponse;
using llm::engine::InferenceResponseInner;

/* The writer thread. If the host has closed the socket, it makes the reader end too. */
void Link::Write()
{
    Held held(lock);
    for (;;) {
        has_outgoing_.wait(held, [this] { return is_lost_ || !outgoing_.empty(); });
        if (is_lost_) {
            return;
        }
        const std::string message = std::move(outgoing_.front());
        outgoing_.pop_front();
        held.unlock();
        const bool is_sent = WriteMessage(host_.fd, message);
        held.lock();
        if (!is_sent) {
            shutdown(host_.fd, SHUT_RDWR);
            return;
        }
    }
}

/* The reader thread. */
void Link::Read()
{
    std::string message;
    Reading reading;
    while ((reading = ReadMessage(host_.fd, &message)) == Reading::MESSAGE) {
        Held held(lock);
        heard_ = Clock::now();
        if (!Take(message)) {
            reading = Reading::BROKEN;
            break;
        }
    }
    const std::string why = WhyItEnded(reading == Reading::BROKEN);
    shutdown(host_.fd, SHUT_RDWR);
    Held held(lock);
    Lose(why);
}

/* Describes why the host ended. Lock not held, because it may wait for the process to end. */
std::string Link::WhyItEnded(bool is_broken) const
{
    {
        Held held(lock);
        if (!mismatch_.empty()) {
            return mismatch_;
        }
        if (state_ == State::CLOSING) {
            return "the engine is closing";
        }
    }
    const std::string host = "the engine's host " + program_ + " ";
    return host + (is_broken ? "broke the protocol" : DescribeEnd(host_.pid));
}

/* Handles the loss of the host: answers waiting calls and ends running requests. Lock held. */
void Link::Lose(const std::string &why)
{
    if (is_lost_) {
        return;
    }
    is_lost_ = true;
    why_lost_ = why;
    for (const auto &numbered : running_) {
        Running &running = *numbered.second;
        if (running.is_accepted && !running.has_end) {
            running.has_end = true;
            events_.push_back({numbered.first, INFER_RESPONSE_EXEC_ERROR, why, {}});
        }
    }
    answered_.notify_all();
    has_outgoing_.notify_all();
    has_event_.notify_all();
}

/* Handles a message of the host. False if the link cannot continue. Lock held. */
bool Link::Take(const std::string &message)
{
    Unpacker fields(message);
    const char kind = fields.Take<char>();
    if (!is_greeted_) {
        return kind == 'H' && TakeHello(&fields);
    }
    switch (kind) {
        case 'l':  /* a sign of life */
            return true;
        case 'a':
            return TakeAnswer(&fields);
        case 'e':
            return TakeEvent(&fields);
        default:
            return false;
    }
}

bool Link::TakeHello(Unpacker *fields)
{
    const auto protocol = fields->Take<uint32_t>();
    const std::string version = fields->TakeText();
    if (!fields->IsGood()) {
        return false;
    }
    if (protocol != PROTOCOL) {
        mismatch_ = "the engine's host " + program_ + ", of kvloom " + version + ", speaks protocol " +
            std::to_string(protocol) + ", this library " + std::to_string(PROTOCOL) +
            ": install the library of that kvloom, `kvloom engine install`";
        return false;
    }
    is_greeted_ = true;
    for (const auto &call : calls_) {
        call.second->is_done = true;
    }
    answered_.notify_all();
    return true;
}

bool Link::TakeAnswer(Unpacker *fields)
{
    const auto found = calls_.find(fields->Take<uint32_t>());
    const auto code = fields->Take<uint8_t>();
    const std::string text = fields->TakeText();
    std::vector<uint64_t> values = fields->TakeNumbers<uint64_t>();
    if (!fields->IsGood() || code > static_cast<uint8_t>(Error::Code::NOT_FOUND)) {
        return false;
    }
    if (found == calls_.end()) {
        return true;  /* given up since */
    }
    Call &call = *found->second;
    call.answer = {Status(static_cast<Error::Code>(code), text), std::move(values)};
    call.is_done = true;
    const auto running = running_.find(call.request);
    if (running != running_.end() && call.answer.status.IsOk()) {
        running->second->is_accepted = true;
    }
    answered_.notify_all();
    return true;
}

bool Link::TakeEvent(Unpacker *fields)
{
    const auto number = fields->Take<uint64_t>();
    const uint32_t flag = fields->Take<uint8_t>();
    std::string error = fields->TakeText();
    std::vector<int64_t> ids = fields->TakeNumbers<int64_t>();
    if (!fields->IsGood() || flag > INFER_RESPONSE_REACH_MAX_OUTPUT_LEN) {
        return false;
    }
    const auto found = running_.find(number);
    if (found == running_.end() || found->second->has_end) {
        return true;  /* its Forward was given up */
    }
    found->second->is_accepted = true;
    found->second->has_end = flag != INFER_RESPONSE_CONTINUE;
    events_.push_back({number, flag, std::move(error), std::move(ids)});
    has_event_.notify_one();
    return true;
}

/* The callback thread: runs until nothing is queued and nothing will be. In a child forked by a callback it ends the
 * process. */
void Link::Deliver()
{
    Held held(lock);
    for (;;) {
        has_event_.wait(held, [this] { return is_closed_ || !events_.empty(); });
        if (events_.empty()) {
            break;
        }
        DeliverFirst(held);
        if (is_forked_) {
            _exit(EXIT_SUCCESS);
        }
    }
    const bool is_last = is_released_by_deliver_;
    held.unlock();
    if (is_last) {
        Release();
    }
}

/* Calls a callback. Returns the message of the exception that it threw; "" if none. */
static std::string CallBack(const llm::engine::SendResponseCallback &callback, std::shared_ptr<InferenceResponse> response)
{
    try {
        callback(response);
    } catch (const std::exception &error) {
        return error.what();
    } catch (...) {
        return "what is no std::exception";
    }
    return "";
}

/* Runs the callback for the first queued response. Lock held, not while it runs. */
void Link::DeliverFirst(Held &held)
{
    Event event = std::move(events_.front());
    events_.pop_front();
    const auto running = running_.at(event.request);
    const bool is_last = event.flag != INFER_RESPONSE_CONTINUE;
    if (is_last) {
        Forget(event.request);
    }
    held.unlock();
    auto inner = std::unique_ptr<InferenceResponseInner>(
        new InferenceResponseInner(running->id, event.flag, std::move(event.ids), event.error));
    const std::string thrown =
        CallBack(*running->callback, std::make_shared<InferenceResponse>(std::move(inner)));
    if (!thrown.empty()) {
        std::fprintf(stderr, "libkvloom_engine: a callback threw %s; its request is stopped\n", thrown.c_str());
    }
    if (is_last) {
        running->callback = nullptr;  /* the program's own destructors, without the lock */
    }
    held.lock();
    if (!thrown.empty()) {
        callback_error_ = callback_error_.empty() ? thrown : callback_error_;
        if (!is_last) {
            Tell(Packer('S').Put(uint32_t{0}).Put(event.request).Take());
        }
    }
}

}
