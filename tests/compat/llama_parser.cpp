// Reads answers with llama.cpp's own parser, which it makes of a chat template.
//
// A line of stdin is {"template": TEXT, "tools": [{"name", "description", "parameters"}], "answers": [TEXT]}; the line of
// stdout for it is a list with an entry for each answer: how it is read where the prompt asks for reasoning and where it
// does not, each {"content", "reasoning", "calls": [[name, arguments]]} or null if it is refused.
//
// Compiled against the headers of common/ and include/, linked with libllama-common and libllama.

#include "chat.h"
#include "log.h"

#include <iostream>
#include <nlohmann/json.hpp>

using json = nlohmann::ordered_json;

static common_chat_templates_inputs asked(const json & given, bool has_reasoning) {
    common_chat_templates_inputs inputs;
    common_chat_msg user;
    user.role = "user";
    user.content = "USER";
    inputs.messages = {user};
    for (const auto & tool : given.at("tools")) {
        inputs.tools.push_back({tool.at("name"), tool.at("description"), tool.at("parameters").dump()});
    }
    inputs.parallel_tool_calls = true;
    inputs.reasoning_format = COMMON_REASONING_FORMAT_AUTO;
    inputs.enable_thinking = has_reasoning;
    return inputs;
}

static json read(const std::string & answer, const common_chat_parser_params & params) {
    try {
        const auto found = common_chat_parse(answer, false, params);
        json calls = json::array();
        for (const auto & call : found.tool_calls) {
            calls.push_back({call.name, call.arguments});
        }
        return {{"content", found.content}, {"reasoning", found.reasoning_content}, {"calls", calls}};
    } catch (const std::exception &) {
        return nullptr;
    }
}

int main() {
    common_log_pause(common_log_main());
    std::string line;
    while (std::getline(std::cin, line)) {
        const json given = json::parse(line);
        json answers = json::array();
        for (const auto & answer : given.at("answers")) {
            (void) answer;
            answers.push_back(json::array());
        }
        for (const bool has_reasoning : {true, false}) {
            try {
                const auto templates = common_chat_templates_init(nullptr, given.at("template"), "<BOS>", "<EOS>");
                const auto prompt = common_chat_templates_apply(templates.get(), asked(given, has_reasoning));
                common_chat_parser_params params(prompt);
                params.reasoning_format = COMMON_REASONING_FORMAT_AUTO;
                if (!prompt.parser.empty()) {
                    params.parser.load(prompt.parser);
                }
                for (size_t at = 0; at < answers.size(); ++at) {
                    answers[at].push_back(read(given.at("answers")[at], params));
                }
            } catch (const std::exception &) {
                continue;  // the template refuses tools
            }
        }
        std::cout << answers.dump(-1, ' ', false, json::error_handler_t::replace) << std::endl;
    }
    return 0;
}
