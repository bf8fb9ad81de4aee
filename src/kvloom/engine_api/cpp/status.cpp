/* Error and Status. */
#include "kvloom_engine/infer_status.h"

#include <memory>
#include <utility>

namespace infrastructure {

Error::Error(Code code) : code_(code) {}

Error::Error(Code code, std::string msg) : code_(code), message_(std::move(msg)) {}

Error::Code Error::ErrorCode() const
{
    return code_;
}

const std::string &Error::Message() const
{
    return message_;
}

bool Error::IsOk() const
{
    return code_ == Code::OK;
}

std::string Error::ToString() const
{
    const std::string code = CodeToString(code_);
    return message_.empty() ? code : code + " " + message_;
}

const char *Error::CodeToString(const Code code)
{
    switch (code) {
        case Code::OK:
            return "OK:";
        case Code::INVALID_ARG:
            return "Invalid argument:";
        case Code::NOT_FOUND:
            return "Not found:";
        default:
            return "Error:";
    }
}

Status::Status(Error::Code code) noexcept : error_(code) {}

Status::Status(Error::Code code, const std::string &msg) : error_(code, msg) {}

Status::Status(const Error &error) : error_(error) {}

Status::Status(Error *error)
{
    const std::unique_ptr<Error> owned(error);
    if (owned != nullptr) {
        error_ = *owned;
    }
}

bool Status::IsOk() const
{
    return error_.IsOk();
}

Error::Code Status::StatusCode() const
{
    return error_.ErrorCode();
}

std::string Status::StatusMsg() const
{
    return error_.Message();
}

}
