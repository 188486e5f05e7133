// SPDX-License-Identifier: Apache-2.0
//
// Chooses the instruction set of an engine.
#include <array>
#include <cstdint>
#include <string>
#include <utility>

#include <hwy/targets.h>

#include <kvpolicy/core/error.hpp>

#include "any_engine.hpp"

namespace kvpolicy::compiled {
namespace {

struct Target {
  std::string_view name;
  bool (*runs)();
  detail::Make* make;
};

#ifdef KVPOLICY_COMPILED_X86
bool has(std::int64_t target) { return (hwy::SupportedTargets() & target) != 0; }
#endif

// Best first.
constexpr std::array targets{
#ifdef KVPOLICY_COMPILED_X86
    Target{"AVX512-VNNI", [] { return has(HWY_AVX3) && __builtin_cpu_supports("avx512vnni") != 0; },
           detail::make_avx512},
    Target{"AVX2", [] { return has(HWY_AVX2); }, detail::make_avx2},
    Target{"SSE4", [] { return has(HWY_SSE4); }, detail::make_sse4},
#endif
    Target{"baseline", [] { return true; }, detail::make_baseline},
};

}  // namespace

std::vector<std::string_view> instruction_sets() {
  std::vector<std::string_view> names;
  for (const Target& target : targets) {
    if (target.runs()) names.push_back(target.name);
  }
  return names;
}

Engine::Engine() : Engine{cpu::SerialFor{}} {}
Engine::Engine(AnyParallelFor pool) : Engine{std::move(pool), instruction_sets().front()} {}

Engine::Engine(AnyParallelFor pool, std::string_view instruction_set) {
  std::string known;
  for (const Target& target : targets) {
    if (!target.runs()) continue;
    if (target.name == instruction_set) {
      engine_ = target.make(target.name, pool);
      return;
    }
    known.append(known.empty() ? "" : ", ").append(target.name);
  }
  fail<ConfigError>("compiled::Engine: instruction set '", instruction_set,
                    "' is not one of those that this processor and this library have: ", known);
}

Engine::Engine(const Engine& other) : engine_{other.engine_->copy()} {}
Engine::Engine(Engine&& other) noexcept = default;
Engine& Engine::operator=(const Engine& other) {
  if (this != &other) engine_ = other.engine_->copy();
  return *this;
}
Engine& Engine::operator=(Engine&& other) noexcept = default;
Engine::~Engine() = default;

void Engine::attend(const LayerAttention& work) { engine_->attend_all({&work, 1}); }
void Engine::attend_all(std::span<const LayerAttention> works) { engine_->attend_all(works); }
void Engine::observe(const LayerObservation& work) { engine_->observe(work); }
void Engine::score(const Plane& rows, std::span<const float> query, std::span<float> out) {
  engine_->score(rows, query, out);
}
void Engine::bound(const LayerBounds& work) { engine_->bound(work); }
std::string_view Engine::instruction_set() const noexcept { return engine_->name(); }

}  // namespace kvpolicy::compiled
