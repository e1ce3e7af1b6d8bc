#!/bin/sh
# Measure again the results in data/h200, and in data/h100 (engine_8b_x1): sh benchmarks/measure.sh FOLDER PART..., from
# the root of the repository, with the package installed or PYTHONPATH=src. Results and printed output go to FOLDER; a
# line reports how each command ended.
set -u
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 PYTHONUNBUFFERED=1
parts="x4 slices x2 fused tune_x4 tune_x2 tune_sms_x2 launches_x2 calibrate_x1 calibrate_x2 engine_8b_x1 engine_70b_x1 engine_405b_x1 profile_x1 engine_8b engine_70b engine_70b_stages engine_405b engine_405b_stages engine_8b_x2 engine_70b_x2 engine_70b_half engine_405b_half tests_cuda tests_fused tests_vendor tests_operations faults faults_cpu fuzz hosts operations_cpu operations_x2 stress_x2 sanitizer_memcheck sanitizer_racecheck headers_x2 headers_x4 tests_nvrar nvrar_x2 tests_overlap tests_prefill_overlap prefill_x2 overlap_all_reduce_x2 overlap_reduce_scatter_x2 overlap_all_gather_x2 overlap_all_to_all_x2 overlap_bound_x2 overlap_scattered_x2 overlap_gathered_x2 overlap_published_x2 training_x2 overlap_hosts products_x1 tests_products tests_few_sms few_sms_x2 few_sms_x4 tests_fused_products fused_products_x1 fused_products_x2 frameworks_cpu frameworks_x2 process_group_cpu process_group_x2 tests_process_group tests_integrations torch_suite_x2 served_trace"
[ $# -ge 2 ] || { echo "usage: sh $0 FOLDER PART...; parts: $parts" >&2; exit 2; }
out=$1
shift
mkdir -p "$out"
start=$(date +%s)

ran() { echo "$1: code $2, $(($(date +%s) - start)) s"; }

# seconds, name, arguments of `shotcast bench`
bench() {
    limit=$1 name=$2
    shift 2
    timeout -k 5 "$limit" python3 -m shotcast bench "$@" --json "$out/$name.json" >"$out/$name.txt" 2>&1
    ran "$name" $?
}

# seconds, name, arguments of `shotcast tune`
tune() {
    limit=$1 name=$2
    shift 2
    timeout -k 5 "$limit" python3 -m shotcast tune "$@" --mode graph -f 4 -o "$out/$name.json" --merge >>"$out/$name.txt" 2>&1
    ran "$name" $?
}

# seconds, name, model, layouts, batches, algorithms and more
engine() {
    limit=$1 name=$2 model=$3 layouts=$4 batches=$5
    shift 5
    bench "$limit" "$name" engine --device cuda --prompt 512 --output 128 --rounds 1 --model "random:llama-3.1-$model" \
        --layouts "$layouts" --batches "$batches" --algorithms "$@"
}

# seconds, name, arguments of `shotcast bench overlap` on two GPUs
overlap() {
    limit=$1 name=$2
    shift 2
    bench "$limit" "overlap_$name" overlap --device cuda --world-size 2 --timeout $((limit - 10)) "$@"
}

# seconds, name, tests
tests() {
    limit=$1 name=$2
    shift 2
    timeout -k 5 "$limit" python3 -m pytest -q -m gpu -p no:cacheprovider --junit-xml "$out/$name.xml" "$@" >"$out/$name.txt" 2>&1
    ran "$name" $?
}

# seconds, name, arguments of a script of this folder
script() {
    limit=$1 name=$2
    shift 2
    timeout -k 5 "$limit" python3 "$@" >"$out/$name.txt" 2>&1
    ran "$name" $?
}

plain=tests/collectives/test_cuda.py
fused=tests/collectives/test_cuda_fused.py
for part in "$@"; do
    case $part in
    x4)
        bench 120 all_reduce_bf16_x4 all-reduce -b 1K -e 256M -f 2 --seconds 0.05
        bench 60 all_reduce_f16_x4 all-reduce -b 1K -e 256M -f 4 -d float16 --seconds 0.04 --algorithms one_shot,two_shot,auto,nccl
        bench 60 all_reduce_f32_x4 all-reduce -b 1K -e 256M -f 4 -d float32 --seconds 0.04 --algorithms one_shot,two_shot,auto,nccl
        bench 60 between_bf16_x4 all-reduce --between gemm -b 16K -e 1M -f 8 --seconds 0.1 --algorithms auto,nccl
        ;;
    slices)
        bench 60 reduce_scatter_bf16_x4 reduce-scatter -b 8K -e 64M -f 8 --seconds 0.04 --algorithms auto,one_shot,nccl
        bench 60 all_gather_bf16_x4 all-gather -b 8K -e 64M -f 8 --seconds 0.04 --algorithms auto,one_shot,nccl
        ;;
    x2)
        bench 120 all_reduce_bf16_x2 all-reduce -b 1K -e 256M -f 2 --seconds 0.04 --world-size 2
        more="one_shot,two_shot,ring,auto,nccl"
        bench 60 all_reduce_f16_x2 all-reduce -b 1K -e 256M -f 4 -d float16 --seconds 0.04 --world-size 2 --algorithms $more
        bench 60 all_reduce_f32_x2 all-reduce -b 1K -e 256M -f 4 -d float32 --seconds 0.04 --world-size 2 --algorithms $more
        ;;
    fused)
        bench 120 fused_bf16_x4 all-reduce-rms-norm --tokens 1,2,4,8,16,32,64,128,256,512 --seconds 0.03 \
            --algorithms one_shot,two_shot,unfused,plain_one_shot,plain_two_shot,fp8_dynamic,nccl
        ;;
    tune_x[24])
        ranks=${part#tune_x}
        tune 200 "nvidia_h200_x$ranks" --op all_reduce -d bfloat16,float32 --seconds 0.3 --world-size "$ranks"
        tune 200 "nvidia_h200_x$ranks" --op reduce_scatter,all_gather -d bfloat16 --seconds 0.3 --world-size "$ranks"
        ;;
    tune_sms_x2) # rows of calls that are given a number of SMs
        tune 580 nvidia_h200_x2 --op all_reduce,reduce_scatter,all_gather -d bfloat16 -b 1M -e 512M --sms 16,24,32 --seconds 0.3 \
            --world-size 2
        ;;
    launches_x2) # every launch of small sums, fused and plain, beside FlashInfer where it is installed
        script 590 launches_x2 benchmarks/launch_sweep.py --world-size 2 --json "$out/launches_x2.json"
        ;;
    calibrate_x[12]) # kernels and host of a GPU, then the calibration; with two, sums as well. FOLDER may have results of sums
        ranks=${part#calibrate_x}
        script 590 "$part" -m shotcast calibrate "$out" --device cuda --world-size "$ranks" --output "$out/calibration.json" \
            --cluster "$out/cluster.yaml"
        ;;
    engine_8b_x1) engine 300 engine_8b_x1 8b 1x1 1,4,16,64,256,512 auto ;;
    engine_70b_x1) engine 500 engine_70b_x1 70b 1x1 1,64,256,512 auto --quantization fp8 ;;
    engine_405b_x1) engine 590 engine_405b_x1 405b:31 1x1 1,64,256,512 auto --quantization fp8 ;; # a quarter of the layers
    profile_x1) # kernels of steps by name
        script 120 profile_8b benchmarks/engine_profile.py --model random:llama-3.1-8b --json "$out/profile_8b.json"
        script 150 profile_70b benchmarks/engine_profile.py --model random:llama-3.1-70b:20 --json "$out/profile_70b.json"
        ;;
    engine_8b) engine 200 engine_8b 8b 4x1 1,64 auto,nccl ;;
    engine_70b) engine 300 engine_70b 70b 4x1 1,64,256 auto,nccl ;;
    engine_70b_stages) engine 400 engine_70b_stages 70b 1x4,2x2 1,64,256 auto ;;
    engine_405b) engine 400 engine_405b 405b 4x1 1,64 auto,nccl --quantization fp8 ;;
    engine_405b_stages) engine 500 engine_405b_stages 405b 1x4,2x2 1,64 auto --quantization fp8 ;;
    engine_8b_x2) engine 200 engine_8b_x2 8b 2x1,1x2 1,64 auto,nccl ;;
    engine_70b_x2) engine 500 engine_70b_x2 70b 2x1,1x2 1,64,256 auto ;;
    engine_70b_half) engine 500 engine_70b_half 70b:40 2x1,1x2 32,128,512 auto ;; # half the layers on two GPUs: the load of each of four GPUs
    engine_405b_half) engine 590 engine_405b_half 405b:63 2x1,1x2 32,128,256 auto --quantization fp8 ;;
    tests_cuda) # four processes at once, as most of the time is spent on compiling
        tests 400 cuda_a "$plain::test_numerics[4]" "$plain::test_graphs_replay_on_changed_inputs[4]" "$plain::test_two_streams[4]" \
            "$plain::test_repeated_calls_take_the_fast_path[4]" "$plain::test_epochs_across_borders[4]" &
        tests 400 cuda_b "$plain::test_matrix[0-4]" "$plain::test_matrix[1-4]" &
        tests 400 cuda_c "$plain::test_ten_thousand_calls_of_changing_size_with_stragglers[4]" \
            "$plain::test_messages_wait_in_the_mailbox[4]" &
        wait
        tests 200 cuda_d "$plain" -k "(4- or 4]) and (killed or late or mismatch)"
        ;;
    tests_fused)
        tests 400 fused_a "$fused" -k "4- and values and all_reduce" &
        tests 400 fused_b "$fused" -k "4- and values and not all_reduce and not all_gather" &
        tests 400 fused_c "$fused" -k "4- and values and all_gather" &
        tests 400 fused_d "$fused" -k "(4- or 4]) and (sentinels or given or graphs or bits)" &
        wait
        tests 500 fused_e "$fused" -k "4] and two_thousand" # last, when most of its kernels are compiled
        tests 200 fused_f "$fused" -k "(4- or 4]) and (killed or late or mismatch)"
        ;;
    tests_vendor) # calls that NCCL serves, with their deadlines
        tests 400 vendor tests/collectives/test_vendor_cuda.py
        ;;
    tests_operations) # random programs on two streams, and graphs of calls with a root
        tests 400 operations tests/collectives/test_cuda_operations.py
        tests 200 uneven tests/collectives/test_uneven.py
        ;;
    faults) # the fault matrix on two GPUs
        export FAULT_MATRIX_JSON="$out/fault_matrix.json"
        tests 590 faults tests/collectives/test_fault_matrix_cuda.py
        unset FAULT_MATRIX_JSON
        ;;
    faults_cpu) # the same on CPU ranks
        export FAULT_MATRIX_JSON="$out/fault_matrix.json"
        tests 3600 faults_cpu -m full -k "every or draws" tests/collectives/test_fault_matrix.py
        unset FAULT_MATRIX_JSON
        ;;
    fuzz) # bodies of requests, against the HTTP server with a scripted engine
        export SERVER_FUZZ_JSON="$out/server_fuzz.json"
        tests 3600 fuzz -m "full or not full" --hypothesis-seed=1 tests/server/test_fuzz.py
        unset SERVER_FUZZ_JSON
        ;;
    hosts) # simulated hosts against Gloo; as root, on CPUs
        over="all-reduce -b 4K -e 16M -f 4 --seconds 1"
        bench 900 hosts_8_1ms $over --hosts 8 --delay-us 1000
        bench 900 hosts_8_10ms $over --hosts 8 --delay-us 10000
        bench 600 hosts_4_1ms $over --hosts 4 --delay-us 1000
        for hosts in 2 4 8; do
            bench 300 hosts_${hosts}_5ms_2gbit all-reduce -b 4K -e 1M -f 4 --seconds 0.4 --hosts $hosts --delay-us 5000 --bandwidth-gbps 2
        done
        bench 600 hosts_2x4_1ms $over --hosts 2 --ranks-per-host 4 --delay-us 1000
        ;;
    operations_cpu) # every operation between CPU ranks beside Gloo, then other reductions and dtypes
        for op in all-reduce reduce-scatter all-gather all-to-all broadcast reduce gather scatter; do
            bench 300 "operations_$op" "$op" --device cpu -g 2,4 -b 64 -e 16M -f 16 --seconds 0.2 --algorithms auto,gloo
        done
        for kind in max/float32 prod/float32 sum/bfloat16 sum/float64 sum/int32 max/int8 min/int64; do
            bench 300 "operations_all-reduce_$(echo "$kind" | tr / _)" all-reduce -o "${kind%/*}" -d "${kind#*/}" --device cpu \
                -g 2 -b 64 -e 16M -f 16 --seconds 0.2 --algorithms auto,gloo
        done
        ;;
    operations_x2) # the same between two GPUs beside NCCL
        for op in all-to-all broadcast reduce gather scatter; do
            bench 100 "operations_$op" "$op" -b 64 -e 256M -f 16 --seconds 0.05 --algorithms auto,nccl
        done
        for kind in max/float32 avg/bfloat16 prod/float32 sum/float64 sum/int32 max/int8 min/int64; do
            bench 100 "operations_all-reduce_$(echo "$kind" | tr / _)" all-reduce -o "${kind%/*}" -d "${kind#*/}" \
                -b 64 -e 256M -f 16 --seconds 0.05 --algorithms auto,nccl
        done
        ;;
    stress_x2) # a million calls added to the runs so far; the first minutes compile, so run it twice on one machine
        kept=benchmarks/data/h200/stress.json
        [ -f "$out/stress.json" ] || [ ! -f "$kept" ] || cp "$kept" "$out/stress.json"
        script 595 stress_x2 benchmarks/stress.py --device cuda --world-size 2 --calls 1000000 --minutes 9 --timeout 10 \
            --json "$out/stress.json"
        ;;
    sanitizer_*) # two ranks, which take turns where there is one GPU; the first command compiles
        share=""
        [ "$(nvidia-smi -L 2>/dev/null | grep -c "^GPU")" = 1 ] && share=--share-gpu
        script 280 "${part}_compiled" benchmarks/sanitize.py --tool none --limit 270 $share
        script 310 "$part" benchmarks/sanitize.py --tool "${part#sanitizer_}" --limit 300 $share
        ;;
    headers_x[24]) # against headers of one word: first, where git is, sh benchmarks/earlier_sources.sh 87a944a
        ranks=${part#headers_x}
        before="benchmarks/compare_sources.py --before earlier/87a944a/src --rounds 5 --most 2"
        script 300 "headers_x$ranks" $before --json "$out/headers_x$ranks.json" -- all-reduce --device cuda -b 1K -e 64K -f 8 \
            --seconds 0.2 --algorithms one_shot,two_shot --world-size "$ranks"
        script 250 "headers_host_x$ranks" $before --json "$out/headers_host_x$ranks.json" -- all-reduce --device cuda --host \
            -b 8K -e 8K --seconds 0.2 --algorithms one_shot,two_shot --world-size "$ranks"
        ;;
    tests_nvrar) # sums over logical nodes: by stores on any number of GPUs, by NVSHMEM's puts on two
        share=""
        [ "$(nvidia-smi -L 2>/dev/null | grep -c "^GPU")" -lt 4 ] && share=1
        SHOTCAST_SHARE_GPUS=$share tests 590 nvrar_stores tests/collectives/test_cuda_nodes.py
        tests 590 nvrar_puts -m "gpu and (full or not full)" tests/collectives/test_cuda_puts.py
        ;;
    nvrar_x2) # two nodes of one GPU each, beside the published form, one node and NCCL
        script 590 nvrar_x2 benchmarks/nvrar_nodes.py --json "$out/nvrar_x2.json"
        ;;
    tests_overlap) # races on one GPU, bits on two
        tests 400 overlap tests/overlap/test_overlap_cuda.py
        share=""
        [ "$(nvidia-smi -L 2>/dev/null | grep -c "^GPU")" -lt 2 ] && share=1
        SHOTCAST_SHARE_GPUS=$share tests 180 overlap_bench tests/bench/test_overlap_bench_cuda.py
        ;;
    tests_prefill_overlap) # prompts in halves: on one GPU too
        share=""
        [ "$(nvidia-smi -L 2>/dev/null | grep -c "^GPU")" -lt 2 ] && share=1
        SHOTCAST_SHARE_GPUS=$share tests 400 prefill_overlap tests/engine/test_prefill_overlap_cuda.py
        ;;
    prefill_x2) # a prompt of 4K tokens by each form of a 70B-shaped model, beside NCCL
        script 590 prefill_x2 benchmarks/prefill.py --json "$out/prefill_x2.json"
        ;;
    overlap_all_reduce_x2 | overlap_all_gather_x2 | overlap_all_to_all_x2) # balanced chains, with every peer
        op=${part#overlap_} op=${op%_x2}
        overlap 590 "$op" --op "$(echo "$op" | tr _ -)" --plot "$out/overlap_$op.png"
        ;;
    overlap_reduce_scatter_x2) # the same, alone and followed by the all-gather
        overlap 290 reduce_scatter --op reduce-scatter --plot "$out/overlap_reduce_scatter.png"
        overlap 290 reduce_scatter_all_gather --op reduce-scatter-all-gather
        ;;
    overlap_bound_x2) # messages of a third of the products' time, and a product that waits for its weights
        overlap 290 compute_bound --op all-reduce --ratio 0.333
        overlap 290 memory_bound --op all-reduce --gemm 16x57344x8192 --steps 32
        ;;
    overlap_scattered_x2) # messages that are whole matrices of products: projections of a 70B model on two ranks
        overlap 590 scattered --whole --rounds 3 --seconds 0.05 --op reduce-scatter \
            --gemm 2048x8192x4096,4096x8192x4096,8192x8192x4096,2048x8192x14336,4096x8192x14336,8192x8192x14336
        ;;
    overlap_gathered_x2) # the same of the other projections
        overlap 590 gathered --whole --rounds 3 --seconds 0.05 --op all-gather \
            --gemm 2048x5120x8192,4096x5120x8192,8192x5120x8192,2048x28672x8192,4096x28672x8192,8192x28672x8192
        ;;
    training_x2) # four layers of an 8B model: gradients in buckets, and divided layers
        script 590 training_x2 benchmarks/training.py --json "$out/training_x2.json"
        ;;
    overlap_published_x2) # the grid of arXiv 2606.09200: small tiles, blocks of an SM, priorities
        quick="--forms published --size 896M --steps 4 --rounds 3 --seconds 0.05"
        for op in all-reduce all-to-all; do
            overlap 140 "published_${op}_square" $quick --op "$op"
            overlap 150 "published_${op}_wide" $quick --op "$op" --gemm 8192x57344x8192
        done
        ;;
    tests_few_sms) # calls that keep to a number of SMs: on one GPU too
        share=""
        [ "$(nvidia-smi -L 2>/dev/null | grep -c "^GPU")" -lt 2 ] && share=1
        SHOTCAST_SHARE_GPUS=$share tests 590 few_sms tests/collectives/test_cuda_few_sms.py -k "2]"
        ;;
    few_sms_x[24]) # 4 to 64 SMs beside all of them, copy engines and NCCL; then other launches of one operation
        ranks=${part#few_sms_x}
        script 590 "$part" benchmarks/few_sms.py --world-size "$ranks" --json "$out/$part.json"
        script 590 "${part}_launches" benchmarks/few_sms.py --world-size "$ranks" --ops all_reduce --sizes 448M --launches \
            --json "$out/${part}_launches.json"
        ;;
    overlap_hosts) # chains of CPU ranks on two simulated hosts, 5 ms apart, and on one; as root
        bench 300 overlap_hosts overlap --hosts 2 --delay-us 5000 --size 4K,64K,256K --plot "$out/overlap_hosts.png"
        bench 300 overlap_hosts_lanes overlap --hosts 2 --delay-us 5000 --size 4K --repeat 8 --lanes 3
        bench 300 overlap_one_host overlap --device cpu --world-size 2 --size 4K,64K,1M
        ;;
    products_x1) # large products that leave room, beside the library's, on one GPU
        script 300 shaped_products benchmarks/shaped_products.py --set tune --json "$out/shaped_products.json"
        ;;
    tests_products) tests 300 products tests/kernels/test_large_gemm_cuda.py tests/overlap/test_products_cuda.py ;;
    tests_fused_products) # products whose tiles are sent as they are finished, or whose rows arrive: on one GPU too
        share=""
        [ "$(nvidia-smi -L 2>/dev/null | grep -c "^GPU")" -lt 2 ] && share=1
        SHOTCAST_SHARE_GPUS=$share tests 590 fused_products tests/overlap/test_summed_products_cuda.py -k "2] or 2-"
        SHOTCAST_SHARE_GPUS=$share tests 400 gathered_products tests/overlap/test_gathered_products_cuda.py \
            tests/overlap/test_overlap_cuda.py -k "gathered or sequence_parallelism"
        ;;
    fused_products_x1) # one rank of two without the other: what sending, adding up and clearing cost
        script 200 fused_products_x1 benchmarks/fused_products.py --alone --json "$out/fused_products_x1.json"
        ;;
    fused_products_x2) # beside product and collective, NCCL and PyTorch's own, with the projections of a 70B model
        script 590 fused_products_x2 benchmarks/fused_products.py --world-size 2 --json "$out/fused_products_x2.json"
        ;;
    frameworks_cpu) # training and generating by the backend of torch.distributed, beside Gloo
        script 3000 frameworks_cpu benchmarks/frameworks.py --rounds 5 --json "$out/frameworks.json"
        ;;
    frameworks_x2) # the same on two GPUs, beside NCCL
        script 590 frameworks_x2 benchmarks/frameworks.py --device cuda --rounds 3 --json "$out/frameworks_x2.json"
        ;;
    process_group_cpu) # calls of torch.distributed by our backend, beside the communicator's and Gloo's
        script 600 process_group_cpu benchmarks/process_group.py --json "$out/process_group.json"
        ;;
    process_group_x2) # the same on two GPUs, eager and captured, beside NCCL's
        script 590 process_group_x2 benchmarks/process_group.py --device cuda --json "$out/process_group_x2.json"
        ;;
    tests_process_group) # calls, messages, graphs and faults of the backend of torch.distributed, and scripts by it
        tests 590 process_group tests/process_group/test_cuda_group.py
        tests 590 frameworks tests/process_group/test_frameworks_cuda.py
        ;;
    tests_integrations) # plug-ins of vLLM and SGLang, batches of every size, and ranks that see one GPU each
        tests 590 integrations tests/integrations/test_cuda_plugins.py tests/collectives/test_cuda_visible.py \
            tests/collectives/test_batch_invariant.py
        ;;
    torch_suite_x2) # PyTorch's own suite on two GPUs, by our backend and by NCCL's
        for backend in shotcast nccl; do
            script 590 "torch_suite_$backend" tests/process_group/torch_suite.py --device cuda --backend "$backend" \
                --world-size 2 --out "$out/torch_suite_x2.json"
        done
        ;;
    served_trace) # kernels of a CPU rank alone, then a trace that the engine serves in real time
        script 600 calibrate_cpu_x1 -m shotcast calibrate --device cpu --output "$out/calibration_x1.json" --cluster "$out/cluster_x1.yaml"
        script 600 served_trace benchmarks/served_trace.py --record "$out/served_trace.json"
        ;;
    *)
        echo "no part $part; parts: $parts" >&2
        exit 2
        ;;
    esac
done
