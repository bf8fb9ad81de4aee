/* The rows of a data set that are still to be forwarded, and the requests that were answered (spec 3.2). */
#ifndef KVLOOM_IO_MANAGER_H
#define KVLOOM_IO_MANAGER_H

#include <cstddef>
#include <cstdint>
#include <exception>
#include <iostream>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "data_loader.h"

namespace SimpleLLMInference {

/* Thread-safe. */
class IOManager {
public:
    IOManager() = default;

    explicit IOManager(const std::string &path)
    {
        SetInputData(path);
    }

    /* Reads a data set. If that fails, writes the reason to stderr and returns false; then there is no data. */
    bool SetInputData(const std::string &path)
    {
        const std::lock_guard<std::mutex> held(lock_);
        next_ = 0;
        answered_.clear();
        rows_.clear();
        try {
            rows_ = LoadData(path);
        } catch (const std::exception &error) {
            std::cerr << path << ": " << error.what() << std::endl;
            return false;
        }
        return true;
    }

    /* Whether all rows were taken. */
    bool Empty()
    {
        const std::lock_guard<std::mutex> held(lock_);
        return next_ == rows_.size();
    }

    /*
     * Takes the next rows that fit the free blocks, slots and prompt tokens. If there is a slot, it takes at least one
     * row; the engine computes a long one in chunks.
     */
    std::vector<std::shared_ptr<Data>> GetInputDataByQuotas(
        uint64_t remainBlocks, uint64_t remainPrefillSlots, uint64_t remainPrefillTokens, uint64_t slotNum)
    {
        const std::lock_guard<std::mutex> held(lock_);
        const uint64_t slots = remainPrefillSlots < slotNum ? remainPrefillSlots : slotNum;
        uint64_t blocks = 0, tokens = 0;
        std::vector<std::shared_ptr<Data>> taken;
        while (next_ < rows_.size() && taken.size() < slots) {
            const uint64_t size = rows_[next_]->size;
            blocks += (size + SMALLEST_BLOCK - 1) / SMALLEST_BLOCK;
            tokens += size;
            if (!taken.empty() && (blocks > remainBlocks || tokens > remainPrefillTokens)) {
                break;
            }
            taken.push_back(rows_[next_++]);
        }
        return taken;
    }

    /* Records that a request was answered, at least in part. */
    void SetOutputData(const std::string &id)
    {
        const std::lock_guard<std::mutex> held(lock_);
        answered_.insert(id);
    }

    size_t NumAnswered()
    {
        const std::lock_guard<std::mutex> held(lock_);
        return answered_.size();
    }

private:
    static constexpr uint64_t SMALLEST_BLOCK = 16;  /* tokens; the API does not report the engine's block size */

    std::mutex lock_;
    std::vector<std::shared_ptr<Data>> rows_;
    size_t next_ = 0;
    std::set<std::string> answered_;
};

}

#endif
