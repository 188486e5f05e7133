// SPDX-License-Identifier: Apache-2.0
#include "context_limit.hpp"

#include <algorithm>

#include <kvpolicy/core/error.hpp>

#include "terminal.hpp"

namespace kvpolicy::tools {

void ContextLimit::add_to(CLI::App& app) {
  app.add_flag("--beyond-context", beyond,
               "Go on where the text is longer than the texts that the model was trained on");
}

void ContextLimit::check(const reference::LlamaConfig& config, std::size_t tokens) const {
  const std::size_t most = config.max_positions;
  require(beyond || most == 0 || tokens <= most, "the text has ", thousands(tokens),
          " tokens, and the model was trained on texts of at most ", thousands(most), ": shorten it by ",
          thousands(tokens - std::min(tokens, most)),
          " tokens, or run the model beyond its context with --beyond-context");
}

}  // namespace kvpolicy::tools
