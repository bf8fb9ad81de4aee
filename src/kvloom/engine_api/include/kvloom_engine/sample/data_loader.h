/* A data set for the document's program: a CSV file, in each row the token ids of a prompt (spec 3.2). */
#ifndef KVLOOM_DATA_LOADER_H
#define KVLOOM_DATA_LOADER_H

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace SimpleLLMInference {

struct Data {
    std::string id;  /* the row's number, from 0 */
    std::vector<int64_t> tokens;
    size_t size;     /* number of tokens */
};

/* Parses a row; `number` is named in errors. Throws std::runtime_error, which names a value that is no token id. */
inline std::shared_ptr<Data> ParseRow(const std::string &row, size_t number)
{
    const auto data = std::make_shared<Data>();
    std::istringstream cells(row);
    for (std::string cell; std::getline(cells, cell, ',');) {
        std::istringstream text(cell);
        int64_t token = 0;
        if (!(text >> token) || !(text >> std::ws).eof()) {
            throw std::runtime_error("row " + std::to_string(number) + ": '" + cell + "' is no token id");
        }
        data->tokens.push_back(token);
    }
    data->id = std::to_string(number);
    data->size = data->tokens.size();
    return data;
}

/* Reads all rows that are not empty. Throws std::runtime_error. */
inline std::vector<std::shared_ptr<Data>> LoadData(const std::string &path)
{
    std::ifstream file(path);
    std::vector<std::shared_ptr<Data>> rows;
    if (!file) {
        throw std::runtime_error("cannot be read");
    }
    for (std::string row; std::getline(file, row);) {
        if (row.find_first_not_of(" \t\r") != std::string::npos) {
            rows.push_back(ParseRow(row, rows.size()));
        }
    }
    return rows;
}

}

#endif
