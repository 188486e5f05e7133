// SPDX-License-Identifier: Apache-2.0
//
// The facts that a result must be read with: the processor's name, cores and third-level cache, and
// the memory, as Linux reports them. On other systems sizes are unknown, and large ones are
// assumed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

namespace kvpolicy::bench {

struct Machine {
  std::string cpu = "unknown processor";
  std::size_t cores = std::max(1U, std::thread::hardware_concurrency());
  std::size_t l3_bytes = std::size_t{128} << 20;
  std::size_t memory_bytes = std::size_t{4} << 30;  ///< available now
};

/// "32768K", "105M", "512".
[[nodiscard]] inline std::size_t bytes_of_size(const std::string& text) {
  std::size_t digits = 0;
  const auto number = static_cast<std::size_t>(std::strtoull(text.c_str(), nullptr, 10));
  while (digits < text.size() && text[digits] >= '0' && text[digits] <= '9') ++digits;
  const char unit = digits < text.size() ? text[digits] : ' ';
  const int shift = unit == 'K' ? 10 : unit == 'M' ? 20 : unit == 'G' ? 30 : 0;
  return number << shift;
}

/// The value after "key   : value" or "key: value"; empty if there is none.
[[nodiscard]] inline std::string value_in(const std::string& path, const std::string& key) {
  std::ifstream file{path};
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos || line.compare(0, key.size(), key) != 0) continue;
    const std::size_t first = line.find_first_not_of(" \t", colon + 1);
    return first == std::string::npos ? std::string{} : line.substr(first);
  }
  return {};
}

[[nodiscard]] inline Machine machine() {
  Machine found;
  const std::string name = value_in("/proc/cpuinfo", "model name");
  if (!name.empty()) found.cpu = name;
  const std::string memory = value_in("/proc/meminfo", "MemAvailable");  // "23456 kB"
  if (!memory.empty()) found.memory_bytes = bytes_of_size(memory) << 10;
  std::size_t largest = 0;
  for (int index = 0; index < 8; ++index) {
    const std::string cache = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index);
    std::ifstream file{cache + "/size"};
    std::string size;
    if (file >> size) largest = std::max(largest, bytes_of_size(size));
  }
  if (largest > 0) found.l3_bytes = largest;
  return found;
}

}  // namespace kvpolicy::bench
