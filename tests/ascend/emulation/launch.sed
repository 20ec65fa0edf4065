# Launches of csrc/launch.asc as C++: kernel<<<blocks, dynamic memory, stream>>>( becomes
# ::emulation::Launched{blocks, dynamic memory, stream, kernel}(. Nothing else is changed.
s/(\w+\([^()]*\))<<<([^<>]*)>>>\(/::emulation::Launched{\2, \1}(/
