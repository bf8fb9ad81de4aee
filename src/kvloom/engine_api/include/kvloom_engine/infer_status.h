/* The result of a call: a code and a message (spec 3.3.1.2.7 and 3.3.1.2.8). */
#ifndef KVLOOM_INFER_STATUS_H
#define KVLOOM_INFER_STATUS_H

#include <string>

namespace infrastructure {

class Error {
public:
    enum class Code {
        OK,
        ERROR,
        INVALID_ARG,
        NOT_FOUND,
        INVALID = INVALID_ARG  /* the name that the parameter tables use */
    };

    explicit Error(Code code = Code::OK);
    explicit Error(Code code, std::string msg);

    Code ErrorCode() const;
    const std::string &Message() const;
    bool IsOk() const;

    /* The code's name, then the message: "Error: no such model". */
    std::string ToString() const;
    static const char *CodeToString(const Code code);

private:
    Code code_;
    std::string message_;
};

class Status {
public:
    explicit Status(Error::Code code = Error::Code::OK) noexcept;
    explicit Status(Error::Code code, const std::string &msg);
    explicit Status(const Error &error);
    explicit Status(Error *error);  /* takes ownership of it and deletes it; NULL = OK */

    bool IsOk() const;
    Error::Code StatusCode() const;
    std::string StatusMsg() const;

private:
    Error error_;
};

}

namespace llm {
namespace engine {

using infrastructure::Error;
using infrastructure::Status;

}
}

#endif
