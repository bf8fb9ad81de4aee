/* Link: starting, calls, closing. */
#include "link.hpp"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <pthread.h>
#include <sys/socket.h>
#include <system_error>
#include <unistd.h>

#include "request.hpp"

namespace kvloom {

/* How long a call waits without any message from the host; and for its first message, before which Python must start.
 * */
#ifndef KVLOOM_ENGINE_PATIENCE_MS
#define KVLOOM_ENGINE_PATIENCE_MS 30000
#endif
#ifndef KVLOOM_ENGINE_START_MS
#define KVLOOM_ENGINE_START_MS 120000
#endif

std::mutex lock;

/* All links whose sockets are open. Never freed, because threads may outlive the program's static objects. */
static std::vector<std::shared_ptr<Link>> *links;
static constexpr uint32_t HELLO_CALL = 0, NOBODY = 0;  /* the number of no other call */
static constexpr size_t NUM_QUOTAS = 3;
static std::atomic<uint32_t> last_call{HELLO_CALL};
static std::atomic<uint64_t> last_request{0};

/* Returns a number that no waiting call has. */
static uint32_t NextCall()
{
    const uint32_t call = ++last_call;
    return call == HELLO_CALL ? ++last_call : call;
}

/* Takes the lock during a fork, so that the child gets consistent data. */
void Link::BeforeFork()
{
    lock.lock();
}

void Link::AfterFork()
{
    lock.unlock();
}

/* Closes the sockets in the child: while they are open there, hosts do not notice that the parent ends. */
void Link::AfterForkInChild()
{
    for (const std::shared_ptr<Link> &link : *links) {
        if (!link->is_forked_) {
            close(link->host_.fd);
            close(link->host_.lifeline);
            link->is_forked_ = true;
        }
    }
    lock.unlock();
}

Status Link::Start()
{
    if (links == nullptr) {
        links = new std::vector<std::shared_ptr<Link>>;
        pthread_atfork(BeforeFork, AfterFork, AfterForkInChild);
    }
    const std::string found = FindHost();
    program_ = found.empty() ? "kvloom engine host" : found;
    const int error = StartHost(found, &host_);
    if (error != 0) {
        return Status(Error::Code::ERROR,
            "the engine's host " + program_ + " cannot be started: " + std::generic_category().message(error));
    }
    links->push_back(shared_from_this());
    heard_ = Clock::now();
    try {
        StartThreads();
    } catch (const std::system_error &) {
        Lose("there is no room for another thread");
        return Lost().status;
    }
    return Status();
}

/* Starts the three threads with all signals blocked, so that the program's own threads handle signals. */
void Link::StartThreads()
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const auto self = shared_from_this();
    try {
        deliver_ = std::thread([self] { self->Deliver(); });
        writer_ = std::thread([self] { self->Write(); });
        reader_ = std::thread([self] { self->Read(); });
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

/* The request's id as text for messages. */
static std::string NameOf(const RequestId &id)
{
    const bool is_text = id.Type() == RequestId::DataType::STRING;
    return is_text ? "'" + id.StringValue() + "'" : std::to_string(id.UnsignedIntValue());
}

Status Link::Open(Held &held, const std::string &config_path, Callback callback)
{
    const Answer hello = Ask(held, HELLO_CALL, Packer('H').Put(PROTOCOL).Take());
    if (!hello.status.IsOk()) {
        return hello.status;
    }
    const uint32_t call = NextCall();
    const Answer loaded = Ask(held, call, Packer('I').Put(call).PutText(config_path).Take());
    if (!loaded.status.IsOk()) {
        return loaded.status;
    }
    max_batch_ = loaded.values.empty() ? 0 : loaded.values[0];
    callback_ = std::move(callback);
    state_ = State::OPEN;
    return Status();
}

Status Link::Forward(const llm::engine::InferenceRequestInner &inner, Callback callback, bool is_checked)
{
    const uint32_t call = NextCall();
    const uint64_t number = ++last_request;
    Packer packer('R');
    packer.Put(call).Put(number).Put(is_checked);
    PackRequest(inner, &packer);
    std::string message = packer.Take();
    const auto running = std::make_shared<Running>(Running{inner.id, std::move(callback)});

    Held held(lock);
    if (numbers_.count(inner.id) != 0) {
        return Status(Error::Code::INVALID_ARG, "request_id: " + NameOf(inner.id) + " is in use");
    }
    running_[number] = running;
    numbers_[inner.id] = number;
    const Answer answer = Ask(held, call, std::move(message), number);
    if (running->is_accepted) {
        return Status();  /* also where the host was lost since: its end comes, or came, as a response */
    }
    if (!answer.status.IsOk()) {
        Forget(number);
        Tell(Packer('S').Put(NOBODY).Put(number).Take());  /* for a host that answers too late */
    }
    return answer.status;
}

Status Link::Stop(Held &held, const RequestId &id)
{
    const auto found = numbers_.find(id);
    if (found == numbers_.end()) {
        return Status(Error::Code::NOT_FOUND, "no running request " + NameOf(id));
    }
    const uint32_t call = NextCall();
    return Ask(held, call, Packer('S').Put(call).Put(found->second).Take()).status;
}

Answer Link::Quotas(Held &held)
{
    const uint32_t call = NextCall();
    const Answer answer = Ask(held, call, Packer('Q').Put(call).Take());
    const bool is_good = !answer.status.IsOk() || answer.values.size() == NUM_QUOTAS;
    return is_good ? answer : Answer{Status(Error::Code::ERROR, "the engine's host broke the protocol"), {}};
}

Status Link::Finish(Held &held)
{
    state_ = State::CLOSING;
    const uint32_t call = NextCall();
    const Answer answer = Ask(held, call, Packer('F').Put(call).Take());
    return callback_error_.empty() ? answer.status : Status(Error::Code::ERROR, "a callback threw " + callback_error_);
}

void Link::Close()
{
    const auto self = shared_from_this();
    if (host_.fd < 0) {
        return;
    }
    {
        Held held(lock);
        state_ = State::CLOSING;
        if (!reader_.joinable()) {
            Lose("the engine is closing");
        }
    }
    shutdown(host_.fd, SHUT_RDWR);
    for (std::thread *thread : {&reader_, &writer_}) {
        if (thread->joinable()) {
            thread->join();
        }
    }
    Held held(lock);
    is_closed_ = true;
    has_event_.notify_all();
    if (IsCallbackThread()) {
        is_released_by_deliver_ = true;
        deliver_.detach();
        return;
    }
    held.unlock();
    if (deliver_.joinable()) {
        deliver_.join();
    }
    Release();
}

/* Closes the socket and reaps the host, when no other thread is left. Lock not held. */
void Link::Release()
{
    {
        Held held(lock);
        close(host_.fd);
        links->erase(std::remove(links->begin(), links->end(), shared_from_this()), links->end());
    }
    ReapHost(host_.pid);
    Held held(lock);
    close(host_.lifeline);
}

/* Sends a call and waits for its answer; ERROR if the host is lost or sends no sign of life in time. Lock held. */
Answer Link::Ask(Held &held, uint32_t call, std::string message, uint64_t request)
{
    if (message.empty()) {
        return {Status(Error::Code::INVALID_ARG, "the request is larger than " + std::to_string(MAX_MESSAGE >> 20U) +
            " MiB"), {}};
    }
    const std::chrono::milliseconds patience(is_greeted_ ? KVLOOM_ENGINE_PATIENCE_MS : KVLOOM_ENGINE_START_MS);
    const auto since = Clock::now();
    Call waiting;
    waiting.request = request;
    calls_[call] = &waiting;
    Tell(std::move(message));
    while (!waiting.is_done && !is_lost_ && Clock::now() < std::max(since, heard_) + patience) {
        answered_.wait_until(held, std::max(since, heard_) + patience);
    }
    calls_.erase(call);
    if (!waiting.is_done && !is_lost_) {
        return {Status(Error::Code::ERROR, "the engine's host has given no sign of life for " +
            std::to_string(patience.count()) + " ms"), {}};
    }
    return waiting.is_done ? waiting.answer : Lost();
}

/* Queues a message for the writer. Lock held. */
void Link::Tell(std::string message)
{
    if (!is_lost_) {
        outgoing_.push_back(std::move(message));
        has_outgoing_.notify_one();
    }
}

/* The result of calls after the host was lost. Lock held. */
Answer Link::Lost() const
{
    return {Status(Error::Code::ERROR, why_lost_), {}};
}

/* No response of the request is delivered any more. The caller keeps it alive: its callback is not ours to destroy
 * here. */
void Link::Forget(uint64_t request)
{
    const auto found = running_.find(request);
    numbers_.erase(found->second->id);
    running_.erase(found);
}

}
