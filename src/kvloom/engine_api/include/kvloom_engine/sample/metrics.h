/* Times and tokens of requests, and the figures over all of them (spec 3.2). */
#ifndef KVLOOM_METRICS_H
#define KVLOOM_METRICS_H

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <map>
#include <string>
#include <vector>

namespace SimpleLLMInference {

using TtimeT = std::chrono::steady_clock::time_point;

/* Figures of one request; costs in microseconds. */
struct Metrics {
    size_t tokensInput = 0;
    size_t tokensOutput = 0;
    TtimeT startingTime;
    TtimeT lastTokenTime;
    TtimeT endingTime;
    size_t firstTokenCost = 0;       /* 0 = there is no token yet */
    size_t lastTokenCost = 0;
    std::vector<size_t> decodeTime;  /* costs of the tokens after the first */
    std::vector<int64_t> outputTokenIds;
};

/* Figures of all requests. The program sets the first five, FormatMetrics the others. */
struct Statistics {
    int64_t requestNumber = 0;
    std::string modelFullName;
    int tp = 1;
    int pp = 1;
    size_t latencyForAll = 0;  /* microseconds */

    size_t tokensInput = 0;
    size_t tokensOutput = 0;
    double firstTokenMs = 0;   /* mean */
    double decodeMs = 0;       /* mean per token */
    double decodeP90Ms = 0;
    double lastTokenMs = 0;    /* mean */
};

/* Mean in milliseconds; 0 if there are no values. */
inline double MeanMs(const std::vector<size_t> &micros)
{
    double sum = 0;
    for (const size_t value : micros) {
        sum += static_cast<double>(value);
    }
    return micros.empty() ? 0 : sum / static_cast<double>(micros.size()) / 1000;
}

inline void FormatMetrics(const std::map<std::string, Metrics> &metrics, Statistics &statistics)
{
    std::vector<size_t> first, decode, last;
    for (const auto &named : metrics) {
        const Metrics &found = named.second;
        statistics.tokensInput += found.tokensInput;
        statistics.tokensOutput += found.tokensOutput;
        first.push_back(found.firstTokenCost);
        last.push_back(found.lastTokenCost);
        decode.insert(decode.end(), found.decodeTime.begin(), found.decodeTime.end());
    }
    statistics.firstTokenMs = MeanMs(first);
    statistics.lastTokenMs = MeanMs(last);
    statistics.decodeMs = MeanMs(decode);
    if (!decode.empty()) {
        std::sort(decode.begin(), decode.end());
        statistics.decodeP90Ms = static_cast<double>(decode[decode.size() * 9 / 10]) / 1000;
    }
}

inline void PrintStatistics(const Statistics &statistics)
{
    const double seconds = static_cast<double>(statistics.latencyForAll) / 1e6;
    const double rate = seconds > 0 ? static_cast<double>(statistics.tokensOutput) / seconds : 0;
    std::cout << statistics.requestNumber << " requests, " << statistics.tokensInput << " tokens in, "
              << statistics.tokensOutput << " out, " << seconds << " s, " << rate << " tok/s" << std::endl
              << "first token " << statistics.firstTokenMs << " ms, decode " << statistics.decodeMs << " ms (p90 "
              << statistics.decodeP90Ms << "), last token " << statistics.lastTokenMs << " ms" << std::endl
              << "model '" << statistics.modelFullName << "', tp " << statistics.tp << ", pp " << statistics.pp
              << std::endl;
}

}

#endif
