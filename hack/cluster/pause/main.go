// Pause holds a pod's namespaces open: it sleeps until it is told to end and reaps what it inherits.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGCHLD)
	for received := range signals {
		if received != syscall.SIGCHLD {
			os.Exit(0)
		}
		reap()
	}
}

// reap collects every child that has ended; one SIGCHLD may stand for several.
func reap() {
	for {
		child, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		if child <= 0 || err != nil {
			return
		}
	}
}
