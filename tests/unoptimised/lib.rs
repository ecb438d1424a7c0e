//! Tests of the core and of the drivers for which optimisation costs several times more than it saves. They are compiled for
//! hundreds of combinations of queues, platforms, formats and buffers, and each does little.
