// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <fstream>
#include <string>

#include <doctest/doctest.h>

#include <kvpolicy/io/duo_pattern.hpp>

#include "says.hpp"
#include "shared_data.hpp"
#include "support/temporary_folder.hpp"

using namespace kvpolicy;
using namespace kvpolicy::testing;

namespace {

// The message of the FormatError for these gates; "" if they are accepted.
std::string refusal(std::string_view text) {
  try {
    (void)io::parse_duo_gates(text, "gates.tsv");
  } catch (const FormatError& error) {
    return error.what();
  }
  return "";
}

std::string config_refusal(std::string_view text) {
  try {
    (void)io::parse_duo_config(text, "config.json");
  } catch (const FormatError& error) {
    return error.what();
  }
  return "";
}

std::string folder_refusal(const std::filesystem::path& folder) {
  try {
    (void)io::load_duo_pattern(folder);
  } catch (const FormatError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("the shipped sample is read") {
  const io::DuoPattern pattern = io::load_duo_pattern(sample_data() / "duo_pattern");
  CHECK(pattern.gates.layers() == 4);
  CHECK(pattern.gates.heads() == 4);
  CHECK(pattern.gates(0, 1) == 0.8125);
  CHECK(pattern.gates(3, 3) == -2.13623046875e-4);
  CHECK(pattern.sinks == 16);
  CHECK(pattern.recent == 64);
}

TEST_CASE("what numpy.savetxt writes is read, with any line ends and blank lines") {
  const HeadGates expected{2, 2, {0.5, -1e-5, 1.0, 3.0}};
  CHECK(io::parse_duo_gates("5.000000000000000000e-01\t-1.000000000000000082e-05\n1\t3\n") == expected);
  CHECK(io::parse_duo_gates("0.5\t-1e-5\r\n1.0\t3e0\r\n") == expected);
  CHECK(io::parse_duo_gates("# gates\n\n 0.5 \t -.00001\n\n+1\t+3.") == expected);
  CHECK(io::parse_duo_gates("7") == HeadGates{1, 1, {7.0}});
}

TEST_CASE("a broken row is refused with its line and field") {
  CHECK(refusal("1\t2\n3\n") == Says{"gates.tsv: line 2 has 1 numbers, the lines before have 2"});
  CHECK(refusal("1\t2\n\n3\t4\t5\n") == Says{"line 3 has 3 numbers"});
  CHECK(refusal("1\t2\n3\t\n") == Says{"line 2, field 2: is empty"});
  CHECK(refusal("1\tx\n") == Says{"line 1, field 2: 'x' is not a number"});
  CHECK(refusal("1\t0.5 0.5\n") == Says{"'0.5 0.5' is not a number"});
  CHECK(refusal("1\tnan\n") == Says{"'nan', must be finite"});
  CHECK(refusal("1\t-inf\n") == Says{"must be finite"});
  CHECK(refusal("1\t1e999\n") == Says{"beyond the range"});
  CHECK(refusal("1\t0x10\n") == Says{"not a number"});
  CHECK(refusal("1\t+-1\n") == Says{"not a number"});
  CHECK(refusal("1,2\n") == Says{"not a number"});
  CHECK(refusal("") == Says{"has no numbers"});
  CHECK(refusal("\n# nothing\n") == Says{"has no numbers"});
  CHECK(refusal(std::string_view{"1\t\0\n", 4}) == Says{"not a number"});
}

TEST_CASE("a config without its two numbers is refused") {
  CHECK(io::parse_duo_config(R"({"sink_size": 0, "recent_size": 9, "lr": 0.02})") ==
        std::pair<std::size_t, std::size_t>{0, 9});
  CHECK(config_refusal(R"({"sink_size": 4})") == Says{"'recent_size' is missing"});
  CHECK(config_refusal(R"({"sink_size": 4, "recent_size": 0})") == Says{"must be at least 1"});
  CHECK(config_refusal(R"({"sink_size": -4, "recent_size": 9})") ==
        Says{"sink_size: must be a whole number, is -4"});
  CHECK(config_refusal(R"({"sink_size": 4.5, "recent_size": 9})") == Says{"is 4.5"});
  CHECK(config_refusal(R"({"sink_size": "4", "recent_size": 9})") == Says{"the string '4'"});
  CHECK(config_refusal(R"({"sink_size": 4, "recent_size": 9999999999})") == Says{"must be at most"});
  CHECK(config_refusal("[]") == Says{"must be an object"});
  CHECK(config_refusal("") == Says{"is empty"});
}

TEST_CASE("a pattern is the same after it was written and read") {
  const TemporaryFolder folder;
  const io::DuoPattern pattern{HeadGates{2, 3, {0.1, 1.0 / 3.0, -5e-324, 1e300, 0.0, -0.25}}, 7, 33};
  io::save_duo_pattern(folder.path() / "new" / "pattern", pattern);
  CHECK(io::load_duo_pattern(folder.path() / "new" / "pattern") == pattern);
  io::DuoPattern broken = pattern;
  broken.gates(0, 0) = std::numeric_limits<double>::quiet_NaN();
  CHECK_THROWS_AS(io::save_duo_pattern(folder.path() / "other", broken), ConfigError);
  CHECK_FALSE(std::filesystem::exists(folder.path() / "other"));
}

TEST_CASE("files that are missing, empty, folders or huge are refused before they are read") {
  const TemporaryFolder folder;
  CHECK(folder_refusal(folder.path() / "none") == Says{"is not a folder"});
  CHECK(folder_refusal(folder.path()) == Says{"full_attention_heads.tsv: there is no such file"});
  std::filesystem::create_directory(folder.path() / io::duo_gates_file);
  CHECK(folder_refusal(folder.path()) == Says{"full_attention_heads.tsv: is a folder"});
  std::filesystem::remove(folder.path() / io::duo_gates_file);
  std::ofstream{folder.path() / io::duo_gates_file};
  CHECK(folder_refusal(folder.path()) == Says{"is empty"});
  std::ofstream{folder.path() / io::duo_gates_file} << "1\t2\n";
  CHECK(folder_refusal(folder.path()) == Says{"config.json: there is no such file"});
  // A sparse file, which takes no space on the disk.
  std::filesystem::resize_file(folder.path() / io::duo_gates_file, std::uintmax_t{1} << 33);
  CHECK(folder_refusal(folder.path()) == Says{"has 8589934592 bytes, must be at most"});
}

TEST_CASE("a pattern may be named by its .tsv file, under any name, with config.json beside it") {
  const TemporaryFolder folder;
  const io::DuoPattern pattern{HeadGates{1, 2, {0.5, 1.0}}, 7, 33};
  io::save_duo_pattern(folder.path(), pattern);
  CHECK(io::load_duo_pattern(folder.path() / io::duo_gates_file) == pattern);
  std::filesystem::rename(folder.path() / io::duo_gates_file, folder.path() / "gates.tsv");
  CHECK(io::load_duo_pattern(folder.path() / "gates.tsv") == pattern);
  CHECK(folder_refusal(folder.path() / io::duo_config_file) == Says{"config.json: is not a folder;"});
  std::filesystem::remove(folder.path() / io::duo_config_file);
  CHECK(folder_refusal(folder.path() / "gates.tsv") == Says{"config.json: there is no such file"});
}

TEST_CASE("a link that leads to itself is a named error for every file") {
  const TemporaryFolder folder;
  const std::filesystem::path loop = folder.path() / "loop";
  std::filesystem::create_symlink(loop, loop);
  CHECK(folder_refusal(loop) == Says{"loop: is not a folder (Too many levels of symbolic links);"});
  std::filesystem::create_symlink(io::duo_gates_file, folder.path() / io::duo_gates_file);
  CHECK(folder_refusal(folder.path()) ==
        Says{"full_attention_heads.tsv: cannot be read: Too many levels of symbolic links"});
  CHECK_THROWS_AS(io::save_duo_pattern(loop, {HeadGates{1, 1, {1.0}}, 1, 1}), StorageError);
}
