/* Shared by the programs of this folder: checks, and an inbox that a callback fills. */
#ifndef CHECK_HPP
#define CHECK_HPP

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unistd.h>
#include <vector>

#include <infer_engine.h>

using namespace llm::engine;

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            _exit(1); \
        } \
    } while (0)

/* Checks a Status: its code, and that its message contains `words`. */
#define CHECK_STATUS(call, code, words) \
    do { \
        const Status status_ = (call); \
        if (status_.StatusCode() != Error::Code::code || status_.StatusMsg().find(words) == std::string::npos) { \
            std::fprintf(stderr, "%s:%d: %s is %d, '%s'\n", __FILE__, __LINE__, #call, \
                static_cast<int>(status_.StatusCode()), status_.StatusMsg().c_str()); \
            _exit(1); \
        } \
    } while (0)

#define CHECK_OK(call) CHECK_STATUS(call, OK, "")

inline std::string KeyOf(const RequestId &id)
{
    return id.Type() == RequestId::DataType::STRING ? id.StringValue() : std::to_string(id.UnsignedIntValue());
}

/* Responses to requests, by their names. */
class Inbox {
public:
    struct Mail {
        std::vector<int64_t> ids;
        int num_responses = 0, num_last = 0;
        uint32_t flag = 0;
        std::string error;
    };

    void Put(InferenceResponse &response)
    {
        InferenceResponse::Output *ids = nullptr, *attributes = nullptr;
        CHECK_OK(response.ImmutableOutput("OUTPUT_IDS", &ids));
        CHECK_OK(response.ImmutableOutput("IBIS_EOS_ATTR", &attributes));
        const int64_t *flag_and_count = static_cast<const int64_t *>(attributes->Buffer());
        CHECK(flag_and_count[0] == response.GetFlags() && flag_and_count[1] == ids->Shape()[0]);
        CHECK(response.IsEOS() == (response.GetFlags() != INFER_RESPONSE_CONTINUE));
        const std::lock_guard<std::mutex> held(lock_);
        Mail &mail = mail_[KeyOf(response.GetRequestId())];
        CHECK(mail.num_last == 0);
        const int64_t *from = static_cast<const int64_t *>(ids->Buffer());
        mail.ids.insert(mail.ids.end(), from, from + ids->Shape()[0]);
        mail.num_responses++;
        mail.num_last += response.IsEOS();
        mail.flag = response.GetFlags();
        mail.error = response.ErrorMsg();
        num_last_ += response.IsEOS();
        changed_.notify_all();
    }

    SendResponseCallback Callback()
    {
        return [this](std::shared_ptr<InferenceResponse> &response) { Put(*response); };
    }

    /* The request's mail, when it has ended. */
    Mail Wait(const std::string &name)
    {
        std::unique_lock<std::mutex> held(lock_);
        changed_.wait(held, [&] { return mail_[name].num_last == 1; });
        return mail_[name];
    }

    void WaitFirst(const std::string &name)
    {
        std::unique_lock<std::mutex> held(lock_);
        changed_.wait(held, [&] { return mail_[name].num_responses > 0; });
    }

    /* How many requests have ended. */
    int NumLast()
    {
        const std::lock_guard<std::mutex> held(lock_);
        return num_last_;
    }

    void Clear()
    {
        const std::lock_guard<std::mutex> held(lock_);
        mail_.clear();
        num_last_ = 0;
    }

private:
    std::mutex lock_;
    std::condition_variable changed_;
    std::map<std::string, Mail> mail_;
    int num_last_ = 0;
};

inline std::shared_ptr<InferenceRequest> MakeRequest(
    const RequestId &id, const std::vector<int64_t> &ids, uint32_t max_output_len = 0)
{
    auto request = std::make_shared<InferenceRequest>(id);
    const int64_t shape[] = {1, static_cast<int64_t>(ids.size())};
    Input *input = nullptr;
    CHECK_OK(request->AddOriginalInput(TYPE_INT64, shape, 2, &input));
    CHECK_OK(input->Allocate(ids.size() * sizeof(int64_t)));
    std::memcpy(input->Buffer(), ids.data(), input->ByteSize());
    CHECK(max_output_len == 0 || request->SetMaxOutputLen(max_output_len));
    return request;
}

static const std::vector<int64_t> NEVER_EOS = {64, 9, 37};  /* the mock model answers with 1370 tokens: found by trying
                                                               many */

#endif
