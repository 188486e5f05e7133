// SPDX-License-Identifier: Apache-2.0
//
// The C interface (kvpolicy/c.h) over one cache type for each element type.
#include <kvpolicy/c.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <filesystem>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include <kvpolicy/cache/saved_cache.hpp>
#include <kvpolicy/compiled/cache.hpp>
#include <kvpolicy/cpu/parallel_for.hpp>
#include <kvpolicy/version.hpp>

using namespace kvpolicy;

struct kvp_plan {
  std::variant<HeadPlan<float>, HeadPlan<float16>, HeadPlan<bfloat16>> of;
};

struct kvp_cache {
  std::variant<compiled::KvCache<float>, compiled::KvCache<float16>, compiled::KvCache<bfloat16>> of;
};

namespace {

// A message is cut if there is no memory for it.
thread_local std::string latest_error;

kvp_status failed(kvp_status status, std::string_view what) noexcept {
  try {
    latest_error = what;
  } catch (...) {
    latest_error.clear();
  }
  return status;
}

// Runs `call` and converts what it throws to a status.
template <class Call>
kvp_status guarded(Call call) noexcept {
  try {
    call();
    return KVP_OK;
  } catch (const ConfigError& error) {
    return failed(KVP_CONFIG_ERROR, error.what());
  } catch (const ShapeError& error) {
    return failed(KVP_SHAPE_ERROR, error.what());
  } catch (const CapacityError& error) {
    return failed(KVP_CAPACITY_ERROR, error.what());
  } catch (const RollbackError& error) {
    return failed(KVP_ROLLBACK_ERROR, error.what());
  } catch (const FormatError& error) {
    return failed(KVP_FORMAT_ERROR, error.what());
  } catch (const StorageError& error) {
    return failed(KVP_STORAGE_ERROR, error.what());
  } catch (const DeviceError& error) {
    return failed(KVP_DEVICE_ERROR, error.what());
  } catch (const OutOfMemory& error) {
    return failed(KVP_OUT_OF_MEMORY, error.what());
  } catch (const std::bad_alloc&) {
    return failed(KVP_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    return failed(KVP_OTHER_ERROR, error.what());
  } catch (...) {
    return failed(KVP_OTHER_ERROR, "an exception of unknown type");
  }
}

// Far above any structure of options that there will be.
constexpr std::size_t most_option_bytes = 4096;

template <class T>
T& given(T* pointer, const char* name) {
  require(pointer != nullptr, "kvpolicy: ", name, " is null");
  return *pointer;
}

// Copies the members of a structure that the caller knows; later members have their defaults.
// A caller of a later version may have members that this library does not know; they must be 0, their default.
template <class T>
T known_part(const T* options, T defaults, const char* name) {
  if (options == nullptr) return defaults;
  const std::size_t size = options->size;
  require(size >= sizeof(std::size_t) && size <= most_option_bytes && size % sizeof(std::size_t) == 0, name,
          ": size is ", size, ", must be sizeof(", name, ") = ", sizeof(T));
  const auto* bytes = reinterpret_cast<const unsigned char*>(options);
  for (std::size_t i = sizeof(T); i < size; ++i) {
    require(bytes[i] == 0, name, ": byte ", i, " of ", size,
            " is set, but this version of the library knows ", sizeof(T), " bytes of it");
  }
  std::memcpy(&defaults, options, std::min(size, sizeof(T)));
  return defaults;
}

// Writes the defaults of the members that the caller knows.
template <class T>
void write_defaults(T* options, T defaults, std::size_t size) {
  if (options == nullptr || size < sizeof(std::size_t)) return;
  std::memset(static_cast<void*>(options), 0, std::min(size, most_option_bytes));
  defaults.size = size;
  std::memcpy(options, &defaults, std::min(size, sizeof(T)));
}

kvp_cache_options default_options() {
  kvp_cache_options options;
  kvp_cache_options_init(&options, sizeof(options));
  return options;
}

CacheOptions cache_options(const kvp_cache_options& own) {
  return {.max_rollback = own.max_rollback,
          .max_append = own.max_append,
          .max_tokens = own.max_tokens,
          .kept_queries = own.kept_queries,
          .page_rows = own.page_rows};
}

compiled::Engine make_engine(std::size_t threads) {
  // OpenMP ends the process if it cannot have the threads.
  constexpr std::size_t most = 1024;
  require(threads <= most, "kvp_cache_options: threads is ", threads, ", must be at most ", most,
          "; 0 is as many as the machine has");
#ifdef _OPENMP
  if (threads != 1) return compiled::Engine{cpu::OpenMpFor{threads}};
#endif
  return compiled::Engine{};
}

// Calls act(element) with a value of the type that `dtype` names.
template <class Act>
void with_element(kvp_dtype dtype, Act act) {
  switch (dtype) {
    case KVP_FLOAT32: return act(float{});
    case KVP_FLOAT16: return act(float16{});
    case KVP_BFLOAT16: return act(bfloat16{});
  }
  fail<ConfigError>("kvpolicy: dtype is ", static_cast<int>(dtype),
                    ", must be KVP_FLOAT32, KVP_FLOAT16 or KVP_BFLOAT16");
}

template <class T>
TensorView<T> view_of(const kvp_tensor& tensor) {
  const std::size_t head = tensor.head_stride == 0 ? tensor.head_dim : tensor.head_stride;
  const std::size_t token = tensor.token_stride == 0 ? tensor.heads * head : tensor.token_stride;
  return {static_cast<T*>(tensor.data), tensor.tokens, tensor.heads, tensor.head_dim, token, head};
}
ConstTensor read(const kvp_tensor* tensor, const char* name) {
  const kvp_tensor& own = given(tensor, name);
  ConstTensor read;
  with_element(own.dtype, [&]<class E>(E) { read = ConstTensor{view_of<const E>(own)}; });
  return read;
}
MutableTensor written(const kvp_tensor* tensor, const char* name) {
  const kvp_tensor& own = given(tensor, name);
  MutableTensor written;
  with_element(own.dtype, [&]<class E>(E) { written = MutableTensor{view_of<E>(own)}; });
  return written;
}

Read read_of(kvp_read read) {
  switch (read) {
    case KVP_READ_ALL: return Read::all;
    case KVP_READ_SELECTED: return Read::selected;
    case KVP_READ_UPPER_HALF: return Read::upper_half;
    case KVP_READ_BOUNDED: return Read::bounded;
    default: break;
  }
  fail<ConfigError>("kvp_attend_options: read is ", read,
                    ", must be KVP_READ_ALL, KVP_READ_SELECTED, KVP_READ_UPPER_HALF or KVP_READ_BOUNDED");
}

Certainty certainty_of(kvp_certainty certainty) {
  switch (certainty) {
    case KVP_SURE: return Certainty::sure;
    case KVP_FOUR_SIGMA: return Certainty::four_sigma;
    case KVP_NO_MARGIN: return Certainty::none;
    default: break;
  }
  fail<ConfigError>("kvp_attend_options: certainty is ", certainty,
                    ", must be KVP_SURE, KVP_FOUR_SIGMA or KVP_NO_MARGIN");
}

// The KV heads that a layer's queries read; none of a layer that is not there, which the call refuses.
std::size_t kv_heads_of(const kvp_cache& cache, std::size_t layer) {
  return std::visit(
      [&](const auto& any) -> std::size_t {
        const ModelShape& shape = any.plan().shape();
        if (layer >= shape.layers) return 0;
        return shape.layer(shape.cache_of(layer)).kv_heads;
      },
      cache.of);
}

AttendOptions attend_options(const kvp_attend_options* options, std::size_t tokens, std::size_t q_heads,
                             std::size_t kv_heads) {
  kvp_attend_options plain;
  kvp_attend_options_init(&plain, sizeof(plain));
  const kvp_attend_options own = known_part(options, plain, "kvp_attend_options");
  AttendOptions attend{
      .softcap = own.softcap, .read = read_of(own.read), .refresh_selection = own.refresh_selection != 0};
  if (own.scale != 0.0F) attend.scale = own.scale;
  if (own.attention_sink_bias != nullptr) attend.attention_sink_bias = {own.attention_sink_bias, q_heads};
  if (own.log_sum_exp != nullptr) attend.log_sum_exp = {own.log_sum_exp, tokens * q_heads};
  attend.bound.epsilon = own.epsilon;
  attend.bound.certainty = certainty_of(own.certainty);
  if (own.most_rows != 0) attend.bound.most_rows = own.most_rows;
  if (own.unread != nullptr) attend.bound.unread = {own.unread, tokens * q_heads};
  if (own.rows_read != nullptr) attend.bound.rows_read = {own.rows_read, kv_heads};
  return attend;
}

ModelShape model_shape(const kvp_shape& shape) {
  return {.layers = shape.layers,
          .q_heads = shape.q_heads,
          .kv_heads = shape.kv_heads,
          .head_dim = shape.head_dim};
}

const ModelShape& shape_of(const kvp_plan* plan) {
  return std::visit([](const auto& own) -> const ModelShape& { return own.shape(); }, given(plan, "plan").of);
}

}  // namespace

const char* kvp_error(void) { return latest_error.c_str(); }

const char* kvp_status_name(kvp_status status) {
  constexpr std::array names{"ok",          "ConfigError",  "ShapeError",  "CapacityError", "RollbackError",
                             "FormatError", "StorageError", "DeviceError", "out of memory", "other error"};
  const auto index = static_cast<std::size_t>(status);
  return index < names.size() ? names[index] : "unknown status";
}

const char* kvp_version(void) {
  static const std::string text = message(version_major, '.', version_minor, '.', version_patch);
  return text.c_str();
}

kvp_status kvp_plan_from_json(const char* text, size_t bytes, kvp_dtype dtype, kvp_plan** out) {
  return guarded([&] {
    kvp_plan*& made = given(out, "out");
    const std::string_view json{&given(text, "text"), bytes};
    with_element(dtype, [&]<class E>(E) { made = new kvp_plan{compiled::parse_plan<E>(json)}; });
  });
}

kvp_status kvp_plan_from_name(const char* name, const kvp_shape* shape, kvp_dtype dtype, kvp_plan** out) {
  return guarded([&] {
    kvp_plan*& made = given(out, "out");
    const std::string_view named{&given(name, "name")};
    const ModelShape model = model_shape(given(shape, "shape"));
    with_element(dtype, [&]<class E>(E) { made = new kvp_plan{compiled::named_plan<E>(named, model)}; });
  });
}

kvp_status kvp_plan_full(const kvp_shape* shape, kvp_dtype dtype, kvp_plan** out) {
  return guarded([&] {
    kvp_plan*& made = given(out, "out");
    const ModelShape model = model_shape(given(shape, "shape"));
    with_element(dtype, [&]<class E>(E) { made = new kvp_plan{HeadPlan<E>{model}}; });
  });
}

kvp_status kvp_plan_to_json(const kvp_plan* plan, char* text, size_t capacity, size_t* bytes) {
  return guarded([&] {
    const std::string json =
        std::visit([](const auto& own) { return compiled::format_plan(own); }, given(plan, "plan").of);
    given(bytes, "bytes") = json.size();
    if (text == nullptr) return;
    require<CapacityError>(capacity > json.size(), "kvp_plan_to_json: the plan has ", json.size(),
                           " bytes and a final zero, capacity is ", capacity);
    std::memcpy(text, json.c_str(), json.size() + 1);
  });
}

kvp_status kvp_plan_shape(const kvp_plan* plan, kvp_shape* out) {
  return guarded([&] {
    const ModelShape& shape = shape_of(plan);
    const LayerShape layer = shape.is_uniform() ? shape.layer(0) : LayerShape{};
    given(out, "out") = {shape.layers, layer.q_heads, layer.kv_heads, layer.head_dim};
  });
}

kvp_status kvp_plan_layer(const kvp_plan* plan, size_t layer, kvp_layer* out) {
  return guarded([&] {
    const ModelShape& shape = shape_of(plan);
    require(layer < shape.layers, "kvp_plan_layer: there is no layer ", layer, ", the plan has ",
            shape.layers);
    const LayerShape own = shape.layer(layer);
    given(out, "out") = {own.q_heads,   own.kv_heads, own.head_dim,
                         own.value_dim, own.window,   shape.cache_of(layer)};
  });
}

void kvp_plan_free(kvp_plan* plan) { delete plan; }

void kvp_cache_options_init(kvp_cache_options* options, size_t size) {
  const CacheOptions own;
  write_defaults(options,
                 {sizeof(kvp_cache_options), own.max_rollback, own.max_append, own.max_tokens,
                  own.kept_queries, own.page_rows, 0},
                 size);
}

kvp_status kvp_plan_memory(const kvp_plan* plan, size_t tokens, const kvp_cache_options* options,
                           int compressed, size_t* bytes) {
  return guarded([&] {
    const auto own = cache_options(known_part(options, default_options(), "kvp_cache_options"));
    std::size_t& total = given(bytes, "bytes");
    std::visit([&](const auto& any) { total = any.memory(tokens, own, compressed != 0).total(); },
               given(plan, "plan").of);
  });
}

kvp_status kvp_cache_new(const kvp_plan* plan, const kvp_cache_options* options, kvp_cache** out) {
  return guarded([&] {
    kvp_cache*& made = given(out, "out");
    const auto own = known_part(options, default_options(), "kvp_cache_options");
    std::visit(
        [&]<class E>(const HeadPlan<E>& any) {
          made = new kvp_cache{compiled::KvCache<E>{any, cache_options(own), make_engine(own.threads)}};
        },
        given(plan, "plan").of);
  });
}

void kvp_cache_free(kvp_cache* cache) { delete cache; }

void kvp_attend_options_init(kvp_attend_options* options, size_t size) {
  write_defaults(options,
                 {sizeof(kvp_attend_options), 0.0F, 0.0F, nullptr, nullptr, KVP_READ_ALL, 0, 0.0F, KVP_SURE,
                  0, nullptr, nullptr},
                 size);
}

kvp_status kvp_cache_step(kvp_cache* cache, size_t layer, const kvp_tensor* q, const kvp_tensor* k,
                          const kvp_tensor* v, const kvp_tensor* out, const kvp_attend_options* options) {
  return guarded([&] {
    kvp_cache& own = given(cache, "cache");
    const ConstTensor queries = read(q, "q");
    const auto attend = attend_options(options, queries.tokens, queries.heads, kv_heads_of(own, layer));
    std::visit(
        [&](auto& any) { any.step(layer, queries, read(k, "k"), read(v, "v"), written(out, "out"), attend); },
        own.of);
  });
}

kvp_status kvp_cache_append(kvp_cache* cache, size_t layer, const kvp_tensor* k, const kvp_tensor* v) {
  return guarded([&] {
    std::visit([&](auto& any) { any.append(layer, read(k, "k"), read(v, "v")); }, given(cache, "cache").of);
  });
}

kvp_status kvp_cache_attend(kvp_cache* cache, size_t layer, const kvp_tensor* q, const kvp_tensor* out,
                            const kvp_attend_options* options) {
  return guarded([&] {
    kvp_cache& own = given(cache, "cache");
    const ConstTensor queries = read(q, "q");
    const auto attend = attend_options(options, queries.tokens, queries.heads, kv_heads_of(own, layer));
    std::visit([&](auto& any) { any.attend(layer, queries, written(out, "out"), attend); }, own.of);
  });
}

kvp_status kvp_cache_truncate(kvp_cache* cache, size_t tokens) {
  return guarded([&] { std::visit([&](auto& any) { any.truncate(tokens); }, given(cache, "cache").of); });
}
kvp_status kvp_cache_commit(kvp_cache* cache) {
  return guarded([&] { std::visit([](auto& any) { any.commit(); }, given(cache, "cache").of); });
}
kvp_status kvp_cache_compress(kvp_cache* cache) {
  return guarded([&] { std::visit([](auto& any) { any.compress(); }, given(cache, "cache").of); });
}
kvp_status kvp_cache_clear(kvp_cache* cache) {
  return guarded([&] { std::visit([](auto& any) { any.clear(); }, given(cache, "cache").of); });
}

kvp_status kvp_cache_fork(const kvp_cache* cache, kvp_cache** out) {
  return guarded([&] {
    kvp_cache*& made = given(out, "out");
    std::visit([&](const auto& any) { made = new kvp_cache{any.fork()}; }, given(cache, "cache").of);
  });
}

kvp_status kvp_cache_fork_as(const kvp_cache* cache, const kvp_plan* plan, kvp_cache** out) {
  return guarded([&] {
    kvp_cache*& made = given(out, "out");
    std::visit(
        [&]<class E, class P>(const compiled::KvCache<E>& any, const HeadPlan<P>& other) {
          if constexpr (std::is_same_v<E, P>) {
            made = new kvp_cache{any.fork_as(other)};
          } else {
            fail<ConfigError>("kvp_cache_fork_as: the plan is for rows in ", name_of(encoding_of<P>),
                              ", the cache has ", name_of(encoding_of<E>));
          }
        },
        given(cache, "cache").of, given(plan, "plan").of);
  });
}

kvp_status kvp_cache_save(const kvp_cache* cache, const char* path, const char* tag) {
  return guarded([&] {
    const std::filesystem::path file{&given(path, "path")};
    std::visit([&](const auto& any) { save(any, file, tag == nullptr ? "" : tag); },
               given(cache, "cache").of);
  });
}

kvp_status kvp_cache_load(kvp_cache* cache, const char* path, const char* tag) {
  return guarded([&] {
    const std::filesystem::path file{&given(path, "path")};
    std::visit([&](auto& any) { load(any, file, tag == nullptr ? "" : tag); }, given(cache, "cache").of);
  });
}

kvp_status kvp_cache_get_info(const kvp_cache* cache, kvp_cache_info* info) {
  return guarded([&] {
    kvp_cache_info& out = given(info, "info");
    const std::size_t size = out.size;
    require(size >= sizeof(std::size_t), "kvp_cache_info: size is ", size,
            ", must be sizeof(kvp_cache_info) = ", sizeof(kvp_cache_info));
    kvp_cache_info own{};
    std::visit(
        [&](const auto& any) {
          own = {size,        any.tokens(),       any.commit_point(),
                 any.bytes(), any.shared_bytes(), any.overhead_bytes()};
        },
        given(cache, "cache").of);
    std::memcpy(&out, &own, std::min(size, sizeof(own)));
  });
}
