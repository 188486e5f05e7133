// SPDX-License-Identifier: Apache-2.0
//
// A prompt cache on disk: the first start reads a long prompt and saves its cache; every later
// start loads the file and continues from there with exactly the same tokens.
//
//   save_load prompt.kvcache    # reads the prompt, saves
//   save_load prompt.kvcache    # loads, continues with the same tokens
//   save_load                   # both in one program, with a temporary file; checks that they agree
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include <kvpolicy/cpu.hpp>
#include <kvpolicy/io/text_file.hpp>
#include <kvpolicy/kvpolicy.hpp>
#include <reference_model/llama.hpp>
#include <reference_model/run.hpp>

#include "common/files.hpp"
#include "common/stopwatch.hpp"

namespace {

using namespace kvpolicy;
using tools::Stopwatch;

using Cache = cpu::KvCache<bfloat16>;

struct Text {
  std::vector<int> prompt;    // what many questions share
  std::vector<int> question;  // what comes after it
};

Text read_text() {
  const std::string path = tools::repository_path("reference_model/weights/heldout_kjv.txt");
  const std::string book = io::read_text_file(path);
  const auto tokens = [&](std::size_t first, std::size_t count) {
    std::vector<int> bytes;
    for (const char c : book.substr(first, count)) bytes.push_back(static_cast<unsigned char>(c));
    return bytes;
  };
  return {tokens(0, 4096), tokens(4096, 64)};
}

Cache empty_cache(const reference::Llama& model) {
  // 4 bits for all rows but the latest, which makes the file small.
  const QuantizedResidualCache<bfloat16>::Config four_bits{.storage = {.bits = 4, .residual = 128}};
  return Cache{HeadPlan{model.config().shape(), four_bits}};
}

// A cache that has read the prompt: loaded if the file holds this prompt, otherwise read by the
// model.
Cache cache_of_prompt(const reference::Llama& model, const std::vector<int>& prompt,
                      const std::filesystem::path& path) {
  // The tag says which model made the rows, and from which tokens.
  const std::string tag = message("keyfinder, ", prompt.size(), " tokens, ", digest(prompt));
  Cache cache = empty_cache(model);
  const Stopwatch loading;
  try {
    load(cache, path, tag);
    std::printf("loaded %zu tokens, %zu bytes of keys and values, in %.1f ms\n", cache.tokens(),
                cache.bytes(), loading.milliseconds());
    return cache;
  } catch (const Error& error) {  // there is no file, or it is for another prompt, plan or model
    std::printf("%s\n", error.what());
  }
  const Stopwatch reading;
  (void)reference::prefill(model, cache, prompt, 512);
  std::printf("read %zu tokens in %.1f ms\n", cache.tokens(), reading.milliseconds());
  const Stopwatch saving;
  save(cache, path, tag);
  std::printf("saved %zu bytes of keys and values as a file of %zu in %.1f ms\n", cache.bytes(),
              static_cast<std::size_t>(std::filesystem::file_size(path)), saving.milliseconds());
  return cache;
}

// The likeliest tokens after a question.
std::string answer(const reference::Llama& model, Cache& cache, const std::vector<int>& question) {
  std::vector<float> logits = reference::step(model, cache, question);
  std::string text;
  while (text.size() < 64) {
    const auto likeliest = std::ranges::max_element(logits) - logits.begin();
    text += static_cast<char>(likeliest);
    logits = reference::step(model, cache, std::array{static_cast<int>(likeliest)});
  }
  std::printf("goes on with: %s\n", text.c_str());
  return text;
}

// A temporary file name; the destructor deletes the file and the parts that saving may have left.
struct OwnFile {
  std::filesystem::path path = std::filesystem::temp_directory_path() / "kvpolicy-save-load.kvcache";
  OwnFile() { remove(); }
  ~OwnFile() { remove(); }
  void remove() const {
    std::error_code ignored;
    std::filesystem::remove(path, ignored);
  }
};

}  // namespace

int main(int argc, char** argv) try {
  const std::string folder = tools::repository_path(tools::shipped_model);
  if (!std::filesystem::exists(std::filesystem::path{folder} / "model.safetensors")) {
    std::printf("skipped: the shipped model's weights are not here (%s)\n", folder.c_str());
    return 0;
  }
  const auto model = reference::Llama::load(folder);
  const Text text = read_text();
  const auto run = [&](const std::filesystem::path& path) {
    Cache cache = cache_of_prompt(model, text.prompt, path);
    return answer(model, cache, text.question);
  };
  if (argc > 1) {
    (void)run(argv[1]);
    return 0;
  }
  const OwnFile file;
  const std::string first = run(file.path);
  const std::string second = run(file.path);
  std::printf(first == second ? "the same token for token\n" : "these differ\n");
  return first == second ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "save_load: %s\n", error.what());
  return 1;
}
