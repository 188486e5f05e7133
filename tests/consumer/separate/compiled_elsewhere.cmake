# SPDX-License-Identifier: Apache-2.0
#
#   cmake -DNM=<nm> -DOBJECT=<object> -P compiled_elsewhere.cmake
# fails if the object has code of a plan, a policy or a cache, and if it needs none of another's.
execute_process(COMMAND ${NM} -C "${OBJECT}" OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "\n[0-9a-f ]+ [A-TV-Za-z] [^\n]*(PolicyHead|PolicySettings|LayerCalls|PlanMemory|ScalarEngine::)[^\n]*" own "${symbols}")
if(own)
  message(FATAL_ERROR "${OBJECT} has its own:${own}")
endif()
string(REGEX MATCHALL "\n +U [^\n]*share_settings<[^\n]*" shared "${symbols}")
list(LENGTH shared count)
if(count LESS 19)
  message(FATAL_ERROR "${OBJECT} asks for ${count} policies, not for the 19 that ship:${shared}")
endif()
