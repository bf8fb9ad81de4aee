/* Requests of a data set, durations, and the file of answers (spec 3.2). */
#ifndef KVLOOM_UTIL_H
#define KVLOOM_UTIL_H

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unistd.h>
#include <vector>

#include "../infer_engine.h"
#include "data_loader.h"
#include "metrics.h"

namespace SimpleLLMInference {

/* A duration in microseconds, at least 1, because 0 means that there is none. */
inline size_t GetDuration(const TtimeT &end, const TtimeT &start)
{
    const auto micros = std::chrono::duration_cast<std::chrono::microseconds>(end - start).count();
    return micros < 1 ? 1 : static_cast<size_t>(micros);
}

/* Makes a request from a row's tokens, with the row's id. Throws std::runtime_error for a row without tokens. */
inline std::shared_ptr<InferenceRequest> MakeRequest(const Data &data)
{
    const auto request = std::make_shared<InferenceRequest>(RequestId(data.id));
    const int64_t shape[] = {1, static_cast<int64_t>(data.size)};
    Input *input = nullptr;
    Status status = request->AddOriginalInput(TYPE_INT64, shape, 2, &input);
    if (status.IsOk()) {
        status = input->Allocate(data.size * sizeof(int64_t));
    }
    if (!status.IsOk()) {
        throw std::runtime_error("row " + data.id + ": " + status.StatusMsg());
    }
    std::memcpy(input->Buffer(), data.tokens.data(), input->ByteSize());
    return request;
}

inline std::vector<std::shared_ptr<InferenceRequest>> Data2Request(const std::vector<std::shared_ptr<Data>> &data)
{
    std::vector<std::shared_ptr<InferenceRequest>> requests;
    for (const auto &row : data) {
        requests.push_back(MakeRequest(*row));
    }
    return requests;
}

/* Writes one row of token ids per request, in the order of the data set. */
inline void WriteOutputIds(const std::map<std::string, std::vector<int64_t>> &outputs, const std::string &path)
{
    std::map<unsigned long long, const std::vector<int64_t> *> rows;
    for (const auto &named : outputs) {
        rows[std::stoull(named.first)] = &named.second;
    }
    std::ofstream file(path);
    for (const auto &row : rows) {
        const char *separator = "";
        for (const int64_t token : *row.second) {
            file << separator << token;
            separator = ",";
        }
        file << "\n";
    }
    if (!file.flush()) {
        std::cerr << path << ": cannot be written" << std::endl;
    }
}

}

#endif
