// SPDX-License-Identifier: Apache-2.0
//
// Defines what compiled/cache.hpp declares, for one element type. Each type has a file of its own, so
// that no file takes long to compile.
#pragma once

#include <kvpolicy/compiled/cache.hpp>
#include <kvpolicy/io/named_plan.hpp>
#include <kvpolicy/io/plan_json.hpp>

namespace kvpolicy::compiled {

template <Element E>
HeadPlan<E> parse_plan(std::string_view text, std::string_view origin) {
  return io::parse_plan<E>(text, origin);
}
template <Element E>
HeadPlan<E> load_plan(const std::string& path) {
  return io::load_plan<E>(path);
}
template <Element E>
HeadPlan<E> named_plan(std::string_view name, const ModelShape& shape) {
  return io::named_plan<E>(name, shape);
}
template <Element E>
std::string format_plan(const HeadPlan<E>& plan) {
  return io::format_plan(plan);
}

}  // namespace kvpolicy::compiled

#define KVPOLICY_COMPILE_CACHE(E)                                                    \
  namespace kvpolicy {                                                               \
  template class detail::LayerCalls<E, compiled::Engine>;                            \
  template class KvCache<E, compiled::Engine>;                                       \
  template HeadPlan<E> compiled::parse_plan<E>(std::string_view, std::string_view);  \
  template HeadPlan<E> compiled::load_plan<E>(const std::string&);                   \
  template HeadPlan<E> compiled::named_plan<E>(std::string_view, const ModelShape&); \
  template std::string compiled::format_plan<E>(const HeadPlan<E>&);                 \
  }
