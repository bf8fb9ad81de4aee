// Prints the first line of an answer, then aborts the request: first_line MODEL PROMPT.
//
//   c++ first_line.cpp -o first_line $(kvloom gewu --cflags --libs)      needs nlohmann/json
#include <condition_variable>
#include <iostream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <qos/qos.h>
#include <string>

using json = nlohmann::json;

// The text received so far. The lock guards every member, because replies come on a thread of the library.
struct Answer {
    std::mutex lock;
    std::condition_variable changed;
    std::string text;
    bool isFinished = false;
};

static void OnResponse(void *context, const char *response)
{
    auto *answer = static_cast<Answer *>(context);
    json reply = json::parse(response);
    std::lock_guard<std::mutex> guard(answer->lock);
    answer->text += reply["message"]["content"].get<std::string>();
    answer->isFinished = !reply["finish_reason"].is_null();
    answer->changed.notify_one();
}

// A session, destroyed at the end of its scope. After the destructor no callback runs any more.
class Session {
public:
    explicit Session(const std::string &model)
        : result(OH_QoS_GewuCreateSession(json{{"model", model}}.dump().c_str()))
    {
    }
    Session(const Session &) = delete;
    Session &operator=(const Session &) = delete;
    ~Session()
    {
        if (result.error == OH_QOS_GEWU_OK) {
            OH_QoS_GewuDestroySession(result.session);
        }
    }
    const OH_QoS_GewuCreateSessionResult result;
};

int main(int argc, char **argv)
{
    if (argc != 3) {
        std::cerr << "usage: " << argv[0] << " MODEL PROMPT\n";
        return 2;
    }
    Answer answer;  // declared before the session, because it must outlive it
    Session session(argv[1]);
    if (session.result.error != OH_QOS_GEWU_OK) {
        std::cerr << "create: " << session.result.error << "\n";
        return 1;
    }
    json request = {{"stream", true}, {"messages", {{{"role", "user"}, {"content", argv[2]}}}}};
    auto submitted = OH_QoS_GewuSubmitRequest(session.result.session, request.dump().c_str(), OnResponse, &answer);
    if (submitted.error != OH_QOS_GEWU_OK) {
        std::cerr << "submit: " << submitted.error << "\n";
        return 1;
    }
    {
        std::unique_lock<std::mutex> guard(answer.lock);
        answer.changed.wait(guard, [&] { return answer.isFinished || answer.text.find('\n') != std::string::npos; });
    }
    OH_QoS_GewuAbortRequest(session.result.session, submitted.request);
    std::cout << answer.text.substr(0, answer.text.find('\n')) << "\n";
    return 0;
}
