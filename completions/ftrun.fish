# fish completion for ftrun. Made by `ftrun completions fish`: do not edit, a test compares the two.
# Use: copy this file to ~/.config/fish/completions/ftrun.fish

function __ftrun_runs
    sh -c '
    if [ -n "$FTRUN_RUNS_ROOT" ]; then root=$FTRUN_RUNS_ROOT
    elif [ -n "$XDG_RUNTIME_DIR" ] && [ -w "$XDG_RUNTIME_DIR" ]; then root=$XDG_RUNTIME_DIR/ftrun
    elif [ -w /dev/shm ]; then root=/dev/shm/ftrun-$(id -u)
    else root=/tmp/ftrun-$(id -u); fi
    cd "$root" 2>/dev/null || exit 0
    for run in *; do
        pid=$(sed -n "s/^{[^{}]*\"pid\": \([0-9]*\).*/\1/p" "$run/run.json" 2>/dev/null)
        [ -n "$pid" ] && [ -d "/proc/$pid" ] && echo "$run"
    done
'
end

# is the command line about command $argv[1], and is there no script yet?
function __ftrun_in
    set -l tokens (commandline -opc)
    set -e tokens[1]
    set -l command run
    if contains -- "$tokens[1]" completions doctor drain events explain inject-fault metrics run runs status stop timeline verify
        set command $tokens[1]
        set -e tokens[1]
    end
    test "$command" = "$argv[1]"; or return 1
    contains -- $command run verify; or return 0
    set -l value 0
    for token in $tokens
        if test $value = 1
            set value 0
        else if string match -q -- '-*' $token
            contains -- $token --check-every --check_every --config --debug-rank --debug_rank --duplicate-stderr-filters --duplicate-stdout-filters --duplicate_stderr_filters --duplicate_stdout_filters --event-log-handler --event_log_handler --fault-plan --fault-seed --fault_plan --fault_seed --faults --forward-signals --forward_signals --hang-ceiling --hang-floor --hang-timeout --hang_ceiling --hang_floor --hang_timeout --heartbeat-interval --heartbeat-timeout --heartbeat_interval --heartbeat_timeout --inexact --keep-logs --keep_logs --local-addr --local-ranks-filter --local_addr --local_ranks_filter --log-dir --log-format --log-line-prefix-template --log-prefix --log_dir --log_format --log_line_prefix_template --log_prefix --logs-specs --logs_specs --master-addr --master-port --master_addr --master_port --max-node-replacements --max-replacements --max-restarts --max_node_replacements --max_replacements --max_restarts --metrics-file --metrics-port --metrics_file --metrics_port --monitor-interval --monitor_interval --nnodes --node-loss --node-rank --node_loss --node_rank --nonfinite --nproc-per-node --nproc_per_node --numa-binding --numa_binding --on-exhausted --on_exhausted --print-completion --print_completion --quarantine-file --quarantine_file --random-faults --random_faults --rdzv-backend --rdzv-conf --rdzv-endpoint --rdzv-id --rdzv_backend --rdzv_conf --rdzv_endpoint --rdzv_id --recover-timeout --recover_timeout --redirects --role --run-id --run_id --shutdown-timeout --shutdown_timeout --signals-to-handle --signals_to_handle --snapshot-every --snapshot_every --spare-nodes --spare_nodes --spares --start-method --start-timeout --start_method --start_timeout --stop-timeout --stop_timeout --tee --worker-start --worker_start --xid-policy --xid_policy -r -t; and set value 1
        else
            return 1
        end
    end
    return 0
end

function __ftrun_at_start
    test (count (commandline -opc)) -eq 1
end

complete -c ftrun -n __ftrun_at_start -a completions -d 'Print the completion file of a shell.'
complete -c ftrun -n __ftrun_at_start -a doctor -d 'Look at everything that ftrun needs of this machine, and say how to mend what is wrong.'
complete -c ftrun -n __ftrun_at_start -a drain -d 'Move a rank to a spare, between two steps, or a whole node to a spare node: for a device or a machine that is to be serviced, or that one does not trust.'
complete -c ftrun -n __ftrun_at_start -a events -d 'List what happened in a run, from its journal (default: the newest run).'
complete -c ftrun -n __ftrun_at_start -a explain -d 'Explain the code that a message of ftrun ended with: what happened, why, and what to do. Without CODE: all of them. Of a RUN: which of its script\'s values are kept with each step, and which are not, and why.'
complete -c ftrun -n __ftrun_at_start -a inject-fault -d 'Strike a live run with a fault, now or where it is asked for. KIND is one of kill, term, segv, abort, exit:CODE, exception, oom, freeze, hang, gil, slow:FACTOR, nan, bitflip, comm, xid:N, gpu-lost, ecc, launcher-kill, node-kill. Exit code 0: it fired; 1: it did not.'
complete -c ftrun -n __ftrun_at_start -a metrics -d 'Print the figures of a live run for Prometheus (default: the newest run).'
complete -c ftrun -n __ftrun_at_start -a run -d 'Run a training script with one worker per GPU or CPU slot. Everything after the script belongs to the script.'
complete -c ftrun -n __ftrun_at_start -a runs -d 'List the live runs of this user, with --all also those that ended and left their logs.'
complete -c ftrun -n __ftrun_at_start -a status -d 'Show what a run does now, live on a terminal (default: the newest run).'
complete -c ftrun -n __ftrun_at_start -a stop -d 'End a run as SIGTERM does, and wait for its end.'
complete -c ftrun -n __ftrun_at_start -a timeline -d 'Tell and draw an incident: which rank failed, when, why, and what it cost.'
complete -c ftrun -n __ftrun_at_start -a verify -d 'Run a script without faults and with faults, and compare every tensor, step by step and at the end.'
complete -c ftrun -n '__ftrun_in completions' -s h -l help -d 'Show this message and exit.'
complete -c ftrun -n '__ftrun_in completions' -f -a 'bash zsh fish'
complete -c ftrun -n '__ftrun_in doctor' -s h -l help -d 'Show this message and exit.'
complete -c ftrun -n '__ftrun_in doctor' -l rdzv-endpoint -d 'Where nodes are to meet: a folder, or HOST[:PORT].' -r -F
complete -c ftrun -n '__ftrun_in doctor' -l json -d 'JSON instead of text.'
complete -c ftrun -n '__ftrun_in drain' -s h -l help -d 'Show this message and exit.'
complete -c ftrun -n '__ftrun_in drain' -l rank -d 'The rank to move, of any node of the run.' -x
complete -c ftrun -n '__ftrun_in drain' -l node -d 'The node to move to a spare one; its ftrun ends with exit code 0.' -x
complete -c ftrun -n '__ftrun_in drain' -l wait -d 'Seconds to wait until it is done.' -x
complete -c ftrun -n '__ftrun_in drain' -l yes -s y -d 'Do not ask; needed without a terminal.'
complete -c ftrun -n '__ftrun_in drain' -l json -d 'JSON instead of text.'
complete -c ftrun -n '__ftrun_in drain' -f -a '(__ftrun_runs)'
complete -c ftrun -n '__ftrun_in events' -s h -l help -d 'Show this message and exit.'
complete -c ftrun -n '__ftrun_in events' -s f -l follow -d 'Go on until the run ends.'
complete -c ftrun -n '__ftrun_in events' -l json -d 'The journal\'s own lines (JSON, one a line).'
complete -c ftrun -n '__ftrun_in events' -f -a '(__ftrun_runs)'
complete -c ftrun -n '__ftrun_in explain' -s h -l help -d 'Show this message and exit.'
complete -c ftrun -n '__ftrun_in explain' -f -a '(__ftrun_runs)'
complete -c ftrun -n '__ftrun_in inject-fault' -s h -l help -d 'Show this message and exit.'
complete -c ftrun -n '__ftrun_in inject-fault' -l rank -d 'Whom to strike [default: the last rank].' -x
complete -c ftrun -n '__ftrun_in inject-fault' -l at -d 'forward, backward, gate, update, idle, stop, reset or restore [default: now, or the next phase of a step].' -x -a 'forward backward gate update idle stop reset restore'
complete -c ftrun -n '__ftrun_in inject-fault' -l step -d 'In this step, counted in its loop as step.index [default: the one that comes].' -x
complete -c ftrun -n '__ftrun_in inject-fault' -l epoch -d 'In this epoch of job.epochs [default: any].' -x
complete -c ftrun -n '__ftrun_in inject-fault' -l after -d 'Seconds to wait before anything is done.' -x
complete -c ftrun -n '__ftrun_in inject-fault' -l for -d 'How long freeze, hang, gil or slow lasts [default: until ftrun ends it].' -x
complete -c ftrun -n '__ftrun_in inject-fault' -l wait -d 'How long to wait for it to fire; 0: leave it waiting for its moment.' -x
complete -c ftrun -n '__ftrun_in inject-fault' -l yes -s y -d 'Do not ask; needed without a terminal.'
complete -c ftrun -n '__ftrun_in inject-fault' -l random -d 'Random faults from now on: how likely a step has one, 0 to 1 (0: no more).' -x
complete -c ftrun -n '__ftrun_in inject-fault' -l seed -d 'Seed of the random faults.' -x
complete -c ftrun -n '__ftrun_in inject-fault' -l json -d 'JSON instead of text.'
complete -c ftrun -n '__ftrun_in inject-fault' -f -a 'kill term segv abort exit: exception oom freeze hang gil slow: nan bitflip comm xid: gpu-lost ecc launcher-kill node-kill'
complete -c ftrun -n '__ftrun_in inject-fault' -f -a '(__ftrun_runs)'
complete -c ftrun -n '__ftrun_in metrics' -s h -l help -d 'Show this message and exit.'
complete -c ftrun -n '__ftrun_in metrics' -l file -d 'Write them to a file until the run ends.' -r -F
complete -c ftrun -n '__ftrun_in metrics' -l port -d 'Serve them on 127.0.0.1 until then.' -x
complete -c ftrun -n '__ftrun_in metrics' -l interval -d 'Seconds between two writings of the file.' -x
complete -c ftrun -n '__ftrun_in metrics' -l json -d 'One look as JSON: a list of name, labels and value.'
complete -c ftrun -n '__ftrun_in metrics' -f -a '(__ftrun_runs)'
complete -c ftrun -n '__ftrun_in run' -s h -l help -d 'Show this message and exit.'
complete -c ftrun -n '__ftrun_in run' -l spares -d 'Warm spare workers.' -x
complete -c ftrun -n '__ftrun_in run' -l max-replacements -d 'Replacements per rank and hour; beyond it exit code 75.' -x
complete -c ftrun -n '__ftrun_in run' -l spare-nodes -d 'Nodes started beside --nnodes that wait to take a lost one\'s place (on every node the same).' -x
complete -c ftrun -n '__ftrun_in run' -l node-loss -d 'With spare nodes: repair a lost node\'s ranks in place, or restart all ranks.' -x -a 'restart repair'
complete -c ftrun -n '__ftrun_in run' -l max-node-replacements -d 'Lost nodes that are replaced in place; after that all ranks restart.' -x
complete -c ftrun -n '__ftrun_in run' -l snapshot-every -d 'Keep the state in host memory every K steps, for the loss of all its replicas at once (0: never).' -x
complete -c ftrun -n '__ftrun_in run' -l on-exhausted -d 'Without a healthy device: end with code 75, or wait for one (shrink is not supported yet).' -x -a 'fail shrink wait'
complete -c ftrun -n '__ftrun_in run' -l xid-policy -d 'What to do about which Xid, from a TOML file.' -r -F
complete -c ftrun -n '__ftrun_in run' -l quarantine-file -d 'Keep devices that failed out of later runs: they stand in this file.' -r -F
complete -c ftrun -n '__ftrun_in run' -l heartbeat-interval -d 'Seconds between two beats of a worker; two missed ones show a frozen process.' -x
complete -c ftrun -n '__ftrun_in run' -l heartbeat-timeout -d 'Seconds without a beat that are too many though no reason is seen.' -x
complete -c ftrun -n '__ftrun_in run' -l hang-timeout -d 'Seconds without any progress; auto: learned from the length of a step.' -x -a 'auto'
complete -c ftrun -n '__ftrun_in run' -l hang-floor -d 'The least that auto may come to.' -x
complete -c ftrun -n '__ftrun_in run' -l hang-ceiling -d 'The most, and the patience with first steps, compilation, job.call and code between steps.' -x
complete -c ftrun -n '__ftrun_in run' -l nonfinite -d 'Gradients that are not finite: do the step again and then stop, stop at once, or ignore them.' -x -a 'redo stop ignore'
complete -c ftrun -n '__ftrun_in run' -l check-every -d 'Check everything in every Nth step; 0 = as often as 0.5 % of the time pays for, replicas in every 100th.' -x
complete -c ftrun -n '__ftrun_in run' -l inexact -d 'A repair after which the result may not be called exact: go on and say so, or end with code 75.' -x -a 'go-on stop'
complete -c ftrun -n '__ftrun_in run' -l stop-timeout -d 'Seconds a worker gets to leave its step.' -x
complete -c ftrun -n '__ftrun_in run' -l recover-timeout -d 'Seconds a repair may make no progress; then who holds it up is replaced.' -x
complete -c ftrun -n '__ftrun_in run' -l start-timeout -d 'Seconds a worker gets to start.' -x
complete -c ftrun -n '__ftrun_in run' -l fault-plan -d 'Inject the faults of a TOML plan.' -r -F
complete -c ftrun -n '__ftrun_in run' -l random-faults -d 'Inject random faults: how likely a step has one, 0 to 1.' -x
complete -c ftrun -n '__ftrun_in run' -l fault-seed -d 'Seed of the random faults.' -x
complete -c ftrun -n '__ftrun_in run' -l run-id -d 'Name of the run (default: the one of --rdzv-id, else random).' -x
complete -c ftrun -n '__ftrun_in run' -l config -d 'Options from a TOML file (default: [tool.ftrun] of ./pyproject.toml).' -r -F
complete -c ftrun -n '__ftrun_in run' -l debug-rank -d 'Give this rank stdin and the terminal: breakpoint() stops there, and is passed over in the others.' -x
complete -c ftrun -n '__ftrun_in run' -l metrics-file -d 'Keep the run\'s figures in a file for Prometheus.' -r -F
complete -c ftrun -n '__ftrun_in run' -l metrics-port -d 'Serve them on 127.0.0.1 as well (0: any free port).' -x
complete -c ftrun -n '__ftrun_in run' -l dry-run -d 'Show what would be run, with --json as JSON, and start nothing.'
complete -c ftrun -n '__ftrun_in run' -l json -d 'With --dry-run.'
complete -c ftrun -n '__ftrun_in run' -l log-format -d 'Lines of the workers as text or JSON.' -x -a 'text json'
complete -c ftrun -n '__ftrun_in run' -l log-prefix -d 'What stands before a worker\'s line: text with {role} {local_rank} {rank} {host} {run} {attempt}.' -x
complete -c ftrun -n '__ftrun_in run' -l keep-logs -d 'Remove logs that are older than 30 days from ftrun-logs while it holds more than this; all: never.' -x -a 'all'
complete -c ftrun -n '__ftrun_in run' -l forward-signals -d 'Signals to pass on to the workers without ending the run, as in USR1,USR2.' -x
complete -c ftrun -n '__ftrun_in run' -l worker-start -d 'Fork workers from a server that has torch, or start an interpreter each.' -x -a 'forkserver exec'
complete -c ftrun -n '__ftrun_in run' -l version -d 'Show the version and exit.'
complete -c ftrun -n '__ftrun_in run' -l nproc-per-node -d 'Workers on this node; gpu:1,3: one on each of these GPUs.' -x -a 'auto gpu cpu xpu'
complete -c ftrun -n '__ftrun_in run' -l max-restarts -d 'Restarts of all workers.' -x
complete -c ftrun -n '__ftrun_in run' -s m -l module -d 'SCRIPT is a module, as in python -m.'
complete -c ftrun -n '__ftrun_in run' -l no-python -d 'SCRIPT is a program of any kind.'
complete -c ftrun -n '__ftrun_in run' -l run-path -d 'Run the script with runpy (ftrun always does); goes before --no-python and -m.'
complete -c ftrun -n '__ftrun_in run' -l virtual-local-rank -d 'Each worker sees only its GPU, as device 0, with LOCAL_RANK=0.'
complete -c ftrun -n '__ftrun_in run' -l numa-binding -d 'Bind workers to the processors near their GPU.' -x -a 'node socket exclusive core-complex'
complete -c ftrun -n '__ftrun_in run' -l signals-to-handle -d 'Signals that end the run and are passed on to the workers.' -x
complete -c ftrun -n '__ftrun_in run' -l shutdown-timeout -d 'Seconds the workers get to end after a signal.' -x
complete -c ftrun -n '__ftrun_in run' -l role -d 'Role of the workers, for their line prefix and ROLE_NAME.' -x
complete -c ftrun -n '__ftrun_in run' -l log-dir -d 'Where the workers\' output is kept.' -x -a '(__fish_complete_directories)'
complete -c ftrun -n '__ftrun_in run' -s r -l redirects -d 'Streams that go to files only: 0 none, 1 stdout, 2 stderr, 3 both, or 0:3,1:1 by local rank.' -x
complete -c ftrun -n '__ftrun_in run' -s t -l tee -d 'Streams that go to files and, with torchrun\'s prefix, to the console.' -x
complete -c ftrun -n '__ftrun_in run' -l log-line-prefix-template -d 'The prefix in torchrun\'s form: ${role_name} ${local_rank} ${rank} ${hostname}; --log-prefix goes before it.' -x
complete -c ftrun -n '__ftrun_in run' -l local-ranks-filter -d 'Show only these local ranks on the console.' -x
complete -c ftrun -n '__ftrun_in run' -l duplicate-stdout-filters -d 'Copy lines of stdout that hold one of these texts into one more file.' -x
complete -c ftrun -n '__ftrun_in run' -l duplicate-stderr-filters -d 'The same for stderr.' -x
complete -c ftrun -n '__ftrun_in run' -l print-completion -d 'Print the completion file of a shell and exit, as ftrun completions does.' -x -a 'bash zsh fish'
complete -c ftrun -n '__ftrun_in run' -l nnodes -d 'Nodes.' -x
complete -c ftrun -n '__ftrun_in run' -l rdzv-backend -d 'How the nodes find each other: static, c10d, file, etcd or kubernetes.' -x
complete -c ftrun -n '__ftrun_in run' -l rdzv-endpoint -d 'Where: HOST[:PORT] (c10d: 29400; etcd: 2379, several with commas), for file a path that all nodes see.' -r -F
complete -c ftrun -n '__ftrun_in run' -l rdzv-id -d 'The same name for every node of one run.' -x
complete -c ftrun -n '__ftrun_in run' -l rdzv-conf -d 'More settings: key=value,key=value.' -x
complete -c ftrun -n '__ftrun_in run' -l standalone -d 'This node only; goes before --rdzv-backend, --rdzv-endpoint and --rdzv-id.'
complete -c ftrun -n '__ftrun_in run' -l node-rank -d 'This node\'s number (static).' -x
complete -c ftrun -n '__ftrun_in run' -l master-addr -d 'Address of node 0 (static).' -x
complete -c ftrun -n '__ftrun_in run' -l master-port -d 'Port on node 0 (static; default: 29500).' -x
complete -c ftrun -n '__ftrun_in run' -l local-addr -d 'Address of this node for the others.' -x
complete -c ftrun -n '__ftrun_in run' -l monitor-interval -d 'ftrun is told of a failure, it does not poll.' -x
complete -c ftrun -n '__ftrun_in run' -l start-method -d 'See --worker-start.' -x -a 'spawn fork forkserver'
complete -c ftrun -n '__ftrun_in run' -l event-log-handler -d 'ftrun keeps a journal of every event.' -x
complete -c ftrun -n '__ftrun_in run' -l logs-specs -d 'Only default; ftrun loads no log plugins.' -x
complete -c ftrun -n '__ftrun_in runs' -s h -l help -d 'Show this message and exit.'
complete -c ftrun -n '__ftrun_in runs' -l all -s a -d 'Those that ended, too, the newest first.'
complete -c ftrun -n '__ftrun_in runs' -l json -d 'JSON instead of text.'
complete -c ftrun -n '__ftrun_in status' -s h -l help -d 'Show this message and exit.'
complete -c ftrun -n '__ftrun_in status' -l once -d 'One snapshot, also on a terminal.'
complete -c ftrun -n '__ftrun_in status' -l interval -d 'Seconds between two looks, at least.' -x
complete -c ftrun -n '__ftrun_in status' -l json -d 'One snapshot as JSON.'
complete -c ftrun -n '__ftrun_in status' -f -a '(__ftrun_runs)'
complete -c ftrun -n '__ftrun_in stop' -s h -l help -d 'Show this message and exit.'
complete -c ftrun -n '__ftrun_in stop' -l wait -d 'Seconds to wait for its end (default: its shutdown timeout and 15 more).' -x
complete -c ftrun -n '__ftrun_in stop' -l yes -s y -d 'Do not ask; needed without a terminal.'
complete -c ftrun -n '__ftrun_in stop' -f -a '(__ftrun_runs)'
complete -c ftrun -n '__ftrun_in timeline' -s h -l help -d 'Show this message and exit.'
complete -c ftrun -n '__ftrun_in timeline' -l incident -d 'Which one, from 1 (default: the last).' -x
complete -c ftrun -n '__ftrun_in timeline' -l format -d 'The form of the drawing.' -x -a 'text svg html trace'
complete -c ftrun -n '__ftrun_in timeline' -s o -l output -d 'Write to a file instead of stdout.' -r -F
complete -c ftrun -n '__ftrun_in timeline' -l json -d 'The incident as JSON.'
complete -c ftrun -n '__ftrun_in timeline' -f -a '(__ftrun_runs)'
complete -c ftrun -n '__ftrun_in verify' -s h -l help -d 'Show this message and exit.'
complete -c ftrun -n '__ftrun_in verify' -l faults -d 'The faults: a TOML plan, as for --fault-plan.' -r -F
complete -c ftrun -n '__ftrun_in verify' -l kill-every-phase -d 'Kill a rank in each phase of a step and of a recovery.'
complete -c ftrun -n '__ftrun_in verify' -l json -d 'The result as JSON.'
complete -c ftrun -n '__ftrun_in verify' -l spares -d 'Warm spare workers.' -x
complete -c ftrun -n '__ftrun_in verify' -l max-replacements -d 'Replacements per rank and hour; beyond it exit code 75.' -x
complete -c ftrun -n '__ftrun_in verify' -l spare-nodes -d 'Nodes started beside --nnodes that wait to take a lost one\'s place (on every node the same).' -x
complete -c ftrun -n '__ftrun_in verify' -l node-loss -d 'With spare nodes: repair a lost node\'s ranks in place, or restart all ranks.' -x -a 'restart repair'
complete -c ftrun -n '__ftrun_in verify' -l max-node-replacements -d 'Lost nodes that are replaced in place; after that all ranks restart.' -x
complete -c ftrun -n '__ftrun_in verify' -l snapshot-every -d 'Keep the state in host memory every K steps, for the loss of all its replicas at once (0: never).' -x
complete -c ftrun -n '__ftrun_in verify' -l on-exhausted -d 'Without a healthy device: end with code 75, or wait for one (shrink is not supported yet).' -x -a 'fail shrink wait'
complete -c ftrun -n '__ftrun_in verify' -l xid-policy -d 'What to do about which Xid, from a TOML file.' -r -F
complete -c ftrun -n '__ftrun_in verify' -l quarantine-file -d 'Keep devices that failed out of later runs: they stand in this file.' -r -F
complete -c ftrun -n '__ftrun_in verify' -l heartbeat-interval -d 'Seconds between two beats of a worker; two missed ones show a frozen process.' -x
complete -c ftrun -n '__ftrun_in verify' -l heartbeat-timeout -d 'Seconds without a beat that are too many though no reason is seen.' -x
complete -c ftrun -n '__ftrun_in verify' -l hang-timeout -d 'Seconds without any progress; auto: learned from the length of a step.' -x -a 'auto'
complete -c ftrun -n '__ftrun_in verify' -l hang-floor -d 'The least that auto may come to.' -x
complete -c ftrun -n '__ftrun_in verify' -l hang-ceiling -d 'The most, and the patience with first steps, compilation, job.call and code between steps.' -x
complete -c ftrun -n '__ftrun_in verify' -l nonfinite -d 'Gradients that are not finite: do the step again and then stop, stop at once, or ignore them.' -x -a 'redo stop ignore'
complete -c ftrun -n '__ftrun_in verify' -l check-every -d 'Check everything in every Nth step; 0 = as often as 0.5 % of the time pays for, replicas in every 100th.' -x
complete -c ftrun -n '__ftrun_in verify' -l inexact -d 'A repair after which the result may not be called exact: go on and say so, or end with code 75.' -x -a 'go-on stop'
complete -c ftrun -n '__ftrun_in verify' -l stop-timeout -d 'Seconds a worker gets to leave its step.' -x
complete -c ftrun -n '__ftrun_in verify' -l recover-timeout -d 'Seconds a repair may make no progress; then who holds it up is replaced.' -x
complete -c ftrun -n '__ftrun_in verify' -l start-timeout -d 'Seconds a worker gets to start.' -x
complete -c ftrun -n '__ftrun_in verify' -l random-faults -d 'Inject random faults: how likely a step has one, 0 to 1.' -x
complete -c ftrun -n '__ftrun_in verify' -l fault-seed -d 'Seed of the random faults.' -x
complete -c ftrun -n '__ftrun_in verify' -l run-id -d 'Name of the run (default: the one of --rdzv-id, else random).' -x
complete -c ftrun -n '__ftrun_in verify' -l config -d 'Options from a TOML file (default: [tool.ftrun] of ./pyproject.toml).' -r -F
complete -c ftrun -n '__ftrun_in verify' -l debug-rank -d 'Give this rank stdin and the terminal: breakpoint() stops there, and is passed over in the others.' -x
complete -c ftrun -n '__ftrun_in verify' -l metrics-file -d 'Keep the run\'s figures in a file for Prometheus.' -r -F
complete -c ftrun -n '__ftrun_in verify' -l metrics-port -d 'Serve them on 127.0.0.1 as well (0: any free port).' -x
complete -c ftrun -n '__ftrun_in verify' -l log-format -d 'Lines of the workers as text or JSON.' -x -a 'text json'
complete -c ftrun -n '__ftrun_in verify' -l log-prefix -d 'What stands before a worker\'s line: text with {role} {local_rank} {rank} {host} {run} {attempt}.' -x
complete -c ftrun -n '__ftrun_in verify' -l keep-logs -d 'Remove logs that are older than 30 days from ftrun-logs while it holds more than this; all: never.' -x -a 'all'
complete -c ftrun -n '__ftrun_in verify' -l forward-signals -d 'Signals to pass on to the workers without ending the run, as in USR1,USR2.' -x
complete -c ftrun -n '__ftrun_in verify' -l worker-start -d 'Fork workers from a server that has torch, or start an interpreter each.' -x -a 'forkserver exec'
complete -c ftrun -n '__ftrun_in verify' -l nproc-per-node -d 'Workers on this node; gpu:1,3: one on each of these GPUs.' -x -a 'auto gpu cpu xpu'
complete -c ftrun -n '__ftrun_in verify' -l max-restarts -d 'Restarts of all workers.' -x
complete -c ftrun -n '__ftrun_in verify' -s m -l module -d 'SCRIPT is a module, as in python -m.'
complete -c ftrun -n '__ftrun_in verify' -l no-python -d 'SCRIPT is a program of any kind.'
complete -c ftrun -n '__ftrun_in verify' -l run-path -d 'Run the script with runpy (ftrun always does); goes before --no-python and -m.'
complete -c ftrun -n '__ftrun_in verify' -l virtual-local-rank -d 'Each worker sees only its GPU, as device 0, with LOCAL_RANK=0.'
complete -c ftrun -n '__ftrun_in verify' -l numa-binding -d 'Bind workers to the processors near their GPU.' -x -a 'node socket exclusive core-complex'
complete -c ftrun -n '__ftrun_in verify' -l signals-to-handle -d 'Signals that end the run and are passed on to the workers.' -x
complete -c ftrun -n '__ftrun_in verify' -l shutdown-timeout -d 'Seconds the workers get to end after a signal.' -x
complete -c ftrun -n '__ftrun_in verify' -l role -d 'Role of the workers, for their line prefix and ROLE_NAME.' -x
complete -c ftrun -n '__ftrun_in verify' -l log-dir -d 'Where the workers\' output is kept.' -x -a '(__fish_complete_directories)'
complete -c ftrun -n '__ftrun_in verify' -s r -l redirects -d 'Streams that go to files only: 0 none, 1 stdout, 2 stderr, 3 both, or 0:3,1:1 by local rank.' -x
complete -c ftrun -n '__ftrun_in verify' -s t -l tee -d 'Streams that go to files and, with torchrun\'s prefix, to the console.' -x
complete -c ftrun -n '__ftrun_in verify' -l log-line-prefix-template -d 'The prefix in torchrun\'s form: ${role_name} ${local_rank} ${rank} ${hostname}; --log-prefix goes before it.' -x
complete -c ftrun -n '__ftrun_in verify' -l local-ranks-filter -d 'Show only these local ranks on the console.' -x
complete -c ftrun -n '__ftrun_in verify' -l duplicate-stdout-filters -d 'Copy lines of stdout that hold one of these texts into one more file.' -x
complete -c ftrun -n '__ftrun_in verify' -l duplicate-stderr-filters -d 'The same for stderr.' -x
complete -c ftrun -n '__ftrun_in verify' -l nnodes -d 'Nodes.' -x
complete -c ftrun -n '__ftrun_in verify' -l rdzv-backend -d 'How the nodes find each other: static, c10d, file, etcd or kubernetes.' -x
complete -c ftrun -n '__ftrun_in verify' -l rdzv-endpoint -d 'Where: HOST[:PORT] (c10d: 29400; etcd: 2379, several with commas), for file a path that all nodes see.' -r -F
complete -c ftrun -n '__ftrun_in verify' -l rdzv-id -d 'The same name for every node of one run.' -x
complete -c ftrun -n '__ftrun_in verify' -l rdzv-conf -d 'More settings: key=value,key=value.' -x
complete -c ftrun -n '__ftrun_in verify' -l standalone -d 'This node only; goes before --rdzv-backend, --rdzv-endpoint and --rdzv-id.'
complete -c ftrun -n '__ftrun_in verify' -l node-rank -d 'This node\'s number (static).' -x
complete -c ftrun -n '__ftrun_in verify' -l master-addr -d 'Address of node 0 (static).' -x
complete -c ftrun -n '__ftrun_in verify' -l master-port -d 'Port on node 0 (static; default: 29500).' -x
complete -c ftrun -n '__ftrun_in verify' -l local-addr -d 'Address of this node for the others.' -x
complete -c ftrun -n '__ftrun_in verify' -l monitor-interval -d 'ftrun is told of a failure, it does not poll.' -x
complete -c ftrun -n '__ftrun_in verify' -l start-method -d 'See --worker-start.' -x -a 'spawn fork forkserver'
complete -c ftrun -n '__ftrun_in verify' -l event-log-handler -d 'ftrun keeps a journal of every event.' -x
complete -c ftrun -n '__ftrun_in verify' -l logs-specs -d 'Only default; ftrun loads no log plugins.' -x
