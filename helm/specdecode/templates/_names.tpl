{{- define "specdecode.fullname" -}}
{{- if not (hasKey .Values "leaderElection") -}}
{{- fail "the values of an older chart are in use: repeat helm upgrade with --reset-then-reuse-values" -}}
{{- end -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Cluster-scoped names carry the namespace, so that releases of one name in two namespaces do not meet. */}}
{{- define "specdecode.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "specdecode.fullname" .) -}}
{{- end -}}

{{- define "specdecode.serviceAccountName" -}}
{{- default (printf "%s-operator" (include "specdecode.fullname" .)) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "specdecode.leaseName" -}}
{{- default (include "specdecode.fullname" .) .Values.leaderElection.leaseName -}}
{{- end -}}

{{- define "specdecode.selector" -}}
app.kubernetes.io/name: specdecode-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* Merged, here and below: Flux refuses a manifest that has a label twice. */}}
{{- define "specdecode.labels" -}}
{{- $own := dict "app.kubernetes.io/version" .Chart.AppVersion "app.kubernetes.io/part-of" "specdecode" -}}
{{- $own = merge $own (dict "app.kubernetes.io/managed-by" .Release.Service) -}}
{{- $own = merge $own (dict "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version)) -}}
{{- $common := .Values.commonLabels | default dict -}}
{{- mergeOverwrite $own $common (fromYaml (include "specdecode.selector" .)) | toYaml -}}
{{- end -}}

{{/* The chart's labels and further ones, which win. */}}
{{- define "specdecode.labelsWith" -}}
{{- mergeOverwrite (fromYaml (include "specdecode.labels" (first .))) (last . | default dict) | toYaml -}}
{{- end -}}

{{- define "specdecode.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{- printf "%s@%s" .repository .digest -}}
{{- else -}}
{{- printf "%s:%s" .repository (default $.Chart.AppVersion .tag) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A name without tag and digest gets the version of the chart's programs: operator and workers are of one version. */}}
{{- define "specdecode.workerImage" -}}
{{- $image := .Values.worker.image -}}
{{- if regexMatch "(:[^/]+|@.+)$" $image -}}
{{- $image -}}
{{- else -}}
{{- printf "%s:%s" $image .Chart.AppVersion -}}
{{- end -}}
{{- end -}}

{{/* Peers of the policies that the operator makes: of the public port, and of the admin port besides routers and Jobs. */}}
{{- define "specdecode.policyPeers" -}}
{{- $namespace := dict "matchLabels" (dict "kubernetes.io/metadata.name" .Release.Namespace) -}}
{{- $pods := dict "matchLabels" (fromYaml (include "specdecode.selector" .)) -}}
{{- $operator := dict "namespaceSelector" $namespace "podSelector" $pods -}}
{{- $workers := .Values.networkPolicy.workers -}}
{{- $admins := prepend ($workers.adminFrom | default list) $operator -}}
{{- dict "clients" ($workers.clientsFrom | default list) "admins" $admins | toJson -}}
{{- end -}}

{{/* Whether pods name their user: on OpenShift the namespace assigns it, and its admission refuses any other. */}}
{{- define "specdecode.fixedUser" -}}
{{- if eq (toString .Values.openshift) "auto" -}}
{{- not (.Capabilities.APIVersions.Has "security.openshift.io/v1") -}}
{{- else -}}
{{- not .Values.openshift -}}
{{- end -}}
{{- end -}}

{{/* Both pods of the chart fit the restricted Pod Security Standard, and OpenShift's restricted-v2. */}}
{{- define "specdecode.podSecurity" -}}
{{- $context := dict "runAsNonRoot" true "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- if eq (include "specdecode.fixedUser" .) "true" -}}
{{- $context = merge $context (dict "runAsUser" 65532 "runAsGroup" 65532 "fsGroup" 65532) -}}
{{- end -}}
{{- mergeOverwrite $context (.Values.podSecurityContext | default dict) | toYaml -}}
{{- end -}}

{{- define "specdecode.containerSecurity" -}}
{{- $context := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true -}}
{{- $context = merge $context (dict "capabilities" (dict "drop" (list "ALL"))) -}}
{{- mergeOverwrite $context (.Values.securityContext | default dict) | toYaml -}}
{{- end -}}
