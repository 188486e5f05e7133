// SPDX-License-Identifier: Apache-2.0
//
// The frame of every tool: reads the command line, and turns an error into one line on stderr and
// an exit status: 0 success, 1 failure, 2 a wrong command line.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <limits>
#include <new>
#include <string>
#include <system_error>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "error_text.hpp"
#include "terminal.hpp"

namespace kvpolicy::tools {

/// Validates counts: CLI11 by itself would read "-1" as a very large number.
[[nodiscard]] inline CLI::Validator whole_number(std::uint64_t least, std::uint64_t most) {
  const std::string range = "a whole number from " + thousands(least) + " to " + thousands(most);
  const auto check = [least, most, range](const std::string& text) -> std::string {
    std::uint64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    const bool whole = error == std::errc{} && end == text.data() + text.size();
    return whole && number >= least && number <= most ? "" : "'" + text + "' is not " + range;
  };
  return CLI::Validator{check, ""};
}
/// Adds an option that takes a whole number.
inline CLI::Option* add_count(CLI::App& command, const char* name, std::size_t& value, const char* about,
                              std::uint64_t least, std::uint64_t most) {
  return command.add_option(name, value, about)
      ->check(whole_number(least, most))
      ->type_name("N")
      ->capture_default_str();
}
/// Validates seeds.
[[nodiscard]] inline CLI::Validator any_whole_number() {
  return whole_number(0, std::numeric_limits<std::uint64_t>::max());
}

/// Validates shares and other numbers: CLI11 by itself would accept any number and NaN.
[[nodiscard]] inline CLI::Validator number_from(double least, double most) {
  const auto check = [least, most](const std::string& text) -> std::string {
    double number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    const bool read = error == std::errc{} && end == text.data() + text.size();
    return read && number >= least && number <= most
               ? ""
               : fmt::format("'{}' is not a number from {:g} to {:g}", text, least, most);
  };
  return CLI::Validator{check, ""};
}

inline constexpr std::uint64_t most_threads = 256;

template <class Work>
int run_tool(CLI::App& app, int argc, char** argv, Work work) {
  const std::string name = app.get_name();
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& asked) {  // --help
    return app.exit(asked);
  } catch (const CLI::ParseError& wrong) {
    fmt::print(stderr, "{}: {}\nTry '{} --help'.\n", name, wrong.what(), name);
    return 2;
  }
  try {
    work();
    return 0;
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "{}: not enough memory; try a shorter text or a smaller plan\n", name);
  } catch (const NamedError& error) {
    fmt::print(stderr, "{}: {}\n", name, error.what());
  } catch (const ConfigError& error) {
    fmt::print(stderr, "{}: {}\n", name, without_cpp_type(error.what()));
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}: {}\n", name, error.what());
  }
  return 1;
}

}  // namespace kvpolicy::tools
