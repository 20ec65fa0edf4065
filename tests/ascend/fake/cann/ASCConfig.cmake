# Stands in for CANN's package ASC: what rewy/backends/ascend/csrc/CMakeLists.txt asks of it, by what its public
# description says. The files beside this one make ASC a language, compiled by the script `bisheng`.
list(APPEND CMAKE_MODULE_PATH ${CMAKE_CURRENT_LIST_DIR})
