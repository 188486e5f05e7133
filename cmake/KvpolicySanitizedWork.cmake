# SPDX-License-Identifier: Apache-2.0
#
# The sanitizers' build does not optimise, since most of it compiles for longer than it runs. This is what runs for longer.
add_library(kvpolicy_sanitized_work INTERFACE)
target_compile_options(kvpolicy_sanitized_work INTERFACE -O1)
# UBSan's check that pointers do not wrap would be up to four fifths of the compile time of most of it, and a third of the
# time that the emulation runs; AddressSanitizer checks what is read through them all the same. What reads files keeps it.
add_library(kvpolicy_sanitized_pointers INTERFACE)
target_compile_options(kvpolicy_sanitized_pointers INTERFACE -fno-sanitize=pointer-overflow)
# Loads of vectors may begin at any number.
add_library(kvpolicy_sanitized_vectors INTERFACE)
target_compile_options(kvpolicy_sanitized_vectors INTERFACE -fno-sanitize=alignment)

function(kvpolicy_link_where_it_is library)
  foreach(target IN LISTS ARGN)
    if(TARGET ${target})
      # Options of libraries come in their order: these after those that turn sanitizers on.
      target_link_libraries(${target} PRIVATE ${library})
    endif()
  endforeach()
endfunction()
set(engines kvpolicy_tool_engine kvpolicy_program_engine test_cpu test_model)
set(readers kvpolicy_reference_model kvpolicy_tokenizer)
set(work ${engines} kvpolicy_tool_policies kvpolicy_program_policies kvpolicy_reference_model_emulated long_runs quickstart shards
  test_cache test_compiled test_core test_cuda test_gradient test_identify test_io test_model_cuda test_offload
  kvpolicy_emulated_bfloat16_64 test_parallel test_plan test_policy test_speculation test_state test_storage test_tools
  test_tools_cuda)
kvpolicy_link_where_it_is(kvpolicy_sanitized_work ${work} ${readers})
kvpolicy_link_where_it_is(kvpolicy_sanitized_pointers ${work})
kvpolicy_link_where_it_is(kvpolicy_sanitized_vectors ${engines})
