// SPDX-License-Identifier: Apache-2.0
//
// The subcommands of identify_heads, each in a file of its name. `add` adds the subcommand's
// options to the command line; when the subcommand is chosen, `work` is set to the function that
// runs it.
#pragma once

#include <functional>

#include <CLI/CLI.hpp>

namespace kvpolicy::tools {

void add_duo(CLI::App& app, std::function<void()>& work);
void add_headkv(CLI::App& app, std::function<void()>& work);
void add_razor(CLI::App& app, std::function<void()>& work);
void add_kvzip(CLI::App& app, std::function<void()>& work);
void add_shares(CLI::App& app, std::function<void()>& work);
void add_damage(CLI::App& app, std::function<void()>& work);

}  // namespace kvpolicy::tools
